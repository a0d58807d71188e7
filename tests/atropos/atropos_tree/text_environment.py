"""The example's letters as most of Atropos' environments collect: text from /v1/chat/completions,
tokenised again.

So a group has no log-probabilities, with `server_type: openai` as with the others.
"""

from atroposlib.envs.base import ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from environment import LettersEnv


class TextLettersEnv(LettersEnv):
    async def collect_trajectories(self, item):
        answer = await self.server.chat_completion(
            messages=self.messages(item),
            n=self.config.group_size,
            max_tokens=self.config.max_tokens,
            temperature=1.0,
        )
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in answer.choices:
            text = choice.message.content
            chat = [*self.messages(item), {"role": "assistant", "content": text}]
            made = tokenize_for_trainer(self.tokenizer, chat, finish_reason=choice.finish_reason)
            group["tokens"].append(made["tokens"])
            group["masks"].append(made["masks"])
            group["scores"].append(self.score(item, text))
        return group, []


if __name__ == "__main__":
    TextLettersEnv.cli()
