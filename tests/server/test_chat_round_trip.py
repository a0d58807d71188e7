"""One conversation by every way into the house has the same prompt ids: a small piece of
tests/soak's round trip."""

from tests.soak.chat_round_trip import FACES, FAMILIES, round_trip


def test_the_same_ids_everywhere() -> None:
    """Server, Responses, Messages, rows, SFT, TRL, traces, ShareGPT rows and a Tinker client."""
    for seed, family, template in zip(
        (1, 2, 3, 4), (*FAMILIES, FAMILIES[0]), ("coder", "deepseek", "plain", "kimi"), strict=True
    ):
        found, wrong = round_trip(30, seed, families=(family,), templates=(template,))
        assert not wrong, wrong[0]
        assert found["chat: refused"] == 0
        for face in FACES:
            assert found[f"{face}: same"] or (face, template) == ("tinker", "plain"), (
                face,
                template,
                found,
            )
