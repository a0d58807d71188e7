"""`python -m mlx_parallm.primitives.inference`: InferenceModule, demonstrated on the model that
comes with the package."""

from mlx_parallm.execution.tool_calls import parse_tool_calls
from mlx_parallm.inference.module import InferenceModule


def add(a: int, b: int) -> int:
    """The sum of two whole numbers."""
    return a + b


def main() -> None:
    questions = ["Sum: 47+38", "Reverse: hfkdo", "Sort: dbca"]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    with InferenceModule("builtin:tiny") as inference:
        results = inference.generate(
            prompts, max_new_tokens=16, do_sample=False, return_logprobs=True
        )
        scored = inference.get_logprobs(prompts, results)
        for question, answer, sampled, again in zip(
            questions, results, results.logprobs or [], scored, strict=True
        ):
            print(
                f"{question:14} → {answer:8} log p = {sampled.sum():.4f}, scored again"
                f" {again.sum():.4f}"
            )
        responses, calls = inference.batch_generate_with_tools(
            prompts[:1], available_tools=[add], max_new_tokens=16
        )
        print(f"offered a tool, it answers {responses[0]!r}: {len(calls[0])} calls")
    text = 'Let me see. ```json\n{"tool": "add", "arguments": {"a": 47, "b": 38}}\n```'
    for call in parse_tool_calls(text, [add]):
        print(
            f"{call.raw_text!r} calls {call.name}{dict(call.arguments)} = {add(**call.arguments)}"
        )


if __name__ == "__main__":
    main()
