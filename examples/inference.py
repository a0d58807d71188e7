"""Show what InferenceModule does, in the order in which one meets it. Runs in seconds: python
examples/inference.py"""

from concurrent.futures import ThreadPoolExecutor

from mlx_parallm.primitives import InferenceModule

# A directory or a hub id, in the place of the model that comes with the package; or what
# mlx_lm.load returned: InferenceModule(model=model, tokenizer=tokenizer).
inference = InferenceModule("builtin:tiny")

# A text is gone on with as it is; a list of messages goes through the chat template.
results = inference.generate(
    ["47+38 =", [{"role": "user", "content": "Sort: dbca"}]], max_new_tokens=8, do_sample=False
)
print("texts:", [text.strip() for text in results])
print("ended by:", results.metadata["finish_reasons"])

# Several answers to one prompt, side by side, with the log-probability of every token.
question = [{"role": "user", "content": "Reverse: hfkdo"}]
several = inference.generate(
    [question], max_new_tokens=8, num_return_sequences=4, seed=0, return_logprobs=True
)
for text, logprobs in zip(several, several.logprobs, strict=True):
    print(f"{text!r:10} log p = {logprobs.sum():.3f}")

# The log-probabilities of given answers: what was sampled (its token ids are scored), or texts.
scores = inference.get_logprobs([question] * 4, several)
print(
    "largest difference to what was sampled:",
    max(abs(a - b).max() for a, b in zip(scores, several.logprobs, strict=True)),
)
print("log p of the right answer:", inference.get_logprobs([question], ["odkfh"])[0].sum())

# And the whole distribution before each token: [tokens, vocabulary].
print("logits:", inference.get_logits([question], ["odkfh"])[0].shape)

# Threads may call at once: their prompts are rows of the same batches.
with ThreadPoolExecutor(8) as threads:
    texts = list(
        threads.map(
            lambda n: inference.generate(f"{n}+{n} =", max_new_tokens=4, do_sample=False)[0],
            range(10, 18),
        )
    )
print("eight threads:", [text.strip() for text in texts])


# Tools: names, {"name", "description", "parameters"}, or functions. Calls are found in the text,
# and nothing is called.
def calculator(expression: str) -> str:
    """Works out an arithmetic expression."""
    return expression


responses, calls = inference.batch_generate_with_tools(
    ["What is 47+38?"], available_tools=[calculator], max_new_tokens=16
)
print("with tools:", responses, [list(parsed) for parsed in calls])

inference.close()
