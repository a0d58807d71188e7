"""Trains the served model with an ordinary openai client: ask with n = 8, judge, reward by the
answer's id."""

import contextlib
import random

import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
with contextlib.suppress(openai.APIConnectionError):  # the run is finished
    while True:
        letters = "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=4))
        ask = [{"role": "user", "content": f"Reverse: {letters}"}]
        answer = client.chat.completions.create(model="default", messages=ask, n=8, max_tokens=8)
        rewards = [choice.message.content == letters[::-1] for choice in answer.choices]
        client.post("/rewards", body={"id": answer.id, "rewards": rewards}, cast_to=object)
