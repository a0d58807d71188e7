"""Every kind of secret that agents' logs hold is hidden, and ordinary text, prose and code stay.

The secrets are made here: none stands in this file. Kinds beside those of the bug report: Langfuse,
Tavily, NVIDIA, Azure's account keys, GitLab's other tokens, XML, JSON within JSON, `sshpass -p`,
OAuth tokens in a fragment, HTML-escaped URLs.
"""

import base64
import random
import string
from pathlib import Path

import pytest

from mlx_parallm.system.redaction import REDACTED, Redactor
from mlx_parallm.system.secret_forms import (
    PERSONAL_FORMS,
    SECRET_FORMS,
    is_card,
    is_iban,
    looks_random,
)

HEX = "0123456789abcdef"
ANY = string.ascii_letters + string.digits
ROOT = Path(__file__).resolve().parents[2]
SOURCE = random.Random(11)


def made(length: int, letters: str = ANY) -> str:
    return "".join(SOURCE.choices(letters, k=length))


def basic() -> str:
    return base64.b64encode(f"user:{made(10)}".encode()).decode()


# kind → where it stands (@ is the secret), and the secret
FORMS: dict[str, list[tuple[str, str]]] = {
    "sendgrid": [("SENDGRID @", f"SG.{made(22)}.{made(43)}")],
    "twilio": [("key @", "SK" + made(32, HEX)), ("twilio auth token: @", made(32, HEX))],
    "discord": [
        ("bot @", f"MT{made(22)}.{made(6)}.{made(38)}"),
        ("https://discord.com/api/webhooks/123456789012345678/@", made(68)),
    ],
    "telegram": [
        ("bot @", f"123456789:AA{made(33)}"),
        ("https://api.telegram.org/bot@/getMe", f"1234567890:{made(35)}"),
    ],
    "digitalocean": [("@", "dop_v1_" + made(64, HEX))],
    "shopify": [("@", "shpat_" + made(32, HEX)), ("@", "shpss_" + made(32, HEX))],
    "databricks": [("@", "dapi" + made(32, HEX)), ("@", "dapi" + made(32, HEX) + "-2")],
    "short": [
        ('{"api_key": "@"}', "a8f3k2"),
        ("wandb login @", made(40, HEX)),
        ('{"auths": {"https://index.docker.io/v1/": {"auth": "@"}}}', basic()),
        ("localhost:5432:mydb:bob:@", "hunter2pass"),
        ("bob:@", f"$apr1${made(8)}${made(22)}"),
        ("bob:@", f"$2y$05${made(53)}"),
        ("bob:@", "{SHA}" + base64.b64encode(made(20).encode()).decode()),
        ("mapbox @", f"sk.eyJ{made(40)}.{made(22)}"),
        ("Passwort: @", "geheim123"),
        ("密码：@", "geheim123"),
        ("密码是 @", "geheim123"),
        ("パスワードは@", "geheim123"),
        ('{"args": ["serve", "--password", "@"]}', "geheim123"),
        ("cmd: ['x', '--api-key', '@']", made(24)),
        ("Das Passwort ist @.", "geheim123"),
        ("the password is @", "hunter2!x"),
        ("The password for the server is '@'", "Tr0ub4dor"),
        ("in base64: @", base64.b64encode(f"sk-{made(30)}1".encode()).decode()),
        ("token @ with signs that are not seen", f"sk-{made(9)}\u200b{made(20)}1"),
        ("pass\u2060word: @", "hunter22"),
        ("\ufeff@", "AKIA2E0A8F3B\u200c244C9986"),
    ],
    "notion": [("@", "secret_" + made(43)), ("@", "ntn_" + made(46))],
    "models": [
        *(
            ("(@)", prefix + made(40))
            for prefix in ("gsk_", "xai-", "r8_", "tml-", "nvapi-", "tvly-", "pplx-", "csk-")
        ),
        ("@", "sk-lf-" + made(8, HEX) + "-" + made(12, HEX)),
        (r'{"out": "a\n@"}', "hf_" + made(34)),  # the line break of JSON within JSON
    ],
    "vault": [
        ("@", "hvs." + made(90)),
        ("VAULT_TOKEN=@", "s." + made(24)),
        ("saw @ there", "s." + made(24)),
    ],
    "gitlab": [("@", "gldt-" + made(20)), ("@", "glrt-" + made(20))],
    "authorization": [
        ("Authorization: Basic @", basic()),
        ('{"Authorization": "Basic @"}', basic()),
        ("-H 'Authorization: Token @'", made(40, HEX)),
    ],
    "cookie": [
        ("Cookie: session=@; theme=dark", made(30)),
        ("Set-Cookie: sid=@; Path=/; HttpOnly", made(20)),
        ('"cookie": "sessionid=@"', made(24)),
        ("curl -b 'sid=@' https://example.org", made(20)),
    ],
    "commands": [
        ("curl -u admin:@ https://example.org", made(9)),
        ("curl -sS -X POST https://example.org --user 'admin:@'", made(9)),
        ("mysqldump --password=@ db", "hunter" + "2"),
        ("tool --db-password @ go", "hunter" + "2x"),
        ("tool --api-key=@", made(20)),
        ("mysql -u root -p@ db", "S3cret" + "Pw"),
        ("sshpass -p @ ssh host", "S3cret" + "Pw"),
        ("docker login -u me -p @", "S3cret" + "Pw"),
    ],
    "netrc": [
        ("machine example.org login joe password @", "hunter" + "2x"),
        ("machine example.org\nlogin joe\npassword @\n", "abcDE" + "F9"),
    ],
    "signatures": [
        ("https://a.blob.core.windows.net/c?sv=2020&sig=@&se=1", made(43) + "%3D"),
        ("https://s3/x?X-Amz-Date=1&X-Amz-Signature=@", made(64, HEX)),
        ("https://s3/x?X-Amz-Security-Token=@&x=1", made(100)),
        ("X-Goog-Signature=@", made(128, HEX)),
        ("https://a?a=1&amp;access_token=@", made(20)),
        ("https://a/b#access_token=@&x=1", made(20)),
    ],
    "passwords": [
        ("password: @\n", "hunter" + "2"),
        ("db:\n  password: @\n", "correct" + "horsebattery"),
        ("DB_PASSWORD=@", "hunter" + "2"),
        ('{"password": "@"}', "hunter" + "2!"),
        (r"{\"password\": \"@\"}", "hunter" + "2!"),
        ("export PGPASSWORD=@", "hunter" + "2"),
        ("MYSQL_PASS=@", "hunter" + "22"),
        ('{"name": "DB_PASSWORD", "value": "@"}', "hunter" + "2"),
        ('{"value": "@", "name": "API_TOKEN"}', "hunter" + "2"),
        ("- name: DB_PASSWORD\n  value: @\n", "hunter" + "2"),
        ("<password>@</password>", "hunter" + "2"),
        ('<add key="ApiKey" value="@"/>', "hunter" + "2abc"),
        ("postgres://u:@@h/db".replace("@@", "@\x40"), "pw" + "1"),
        ("AccountKey=@;EndpointSuffix", base64.b64encode(SOURCE.randbytes(64)).decode()),
    ],
    "forty characters": [
        (place, made(40, ANY + "+/"))
        for place in (
            "secret @",
            "the secret is @",
            "AWS secret access key: @",
            "my secret: `@`",
            'secret: "@"',
        )
        for _ in range(20)
    ],
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_secret_is_hidden(kind: str) -> None:
    finder = Redactor()
    for place, secret in FORMS[kind]:
        before, _, after = place.partition("@")
        text = finder.text(before + secret + after)
        assert secret not in text and REDACTED in text, (place, text)
        long = ("plain words of a log, and more of them\n" * 50) + before + secret + after
        assert secret not in finder.text(long), place


def test_an_object_that_names_its_value() -> None:
    """As the variables of a container, a header of a recorded request."""
    env = [{"name": "DB_PASSWORD", "value": "short"}, {"name": "PORT", "value": "80"}]
    assert Redactor().value(env) == [
        {"name": "DB_PASSWORD", "value": REDACTED},
        {"name": "PORT", "value": "80"},
    ]
    assert Redactor().value({"key": "Authorization", "value": "x"}) == {
        "key": "Authorization",
        "value": REDACTED,
    }
    assert Redactor().value({"x-api-key": "a", "dbPassword": "b", "Cookie": "c"}) == dict.fromkeys(
        ("x-api-key", "dbPassword", "Cookie"), REDACTED
    )


@pytest.mark.parametrize(
    "text",
    [
        "def login(user: str, password: str) -> None: self.password = password",
        "password = get_password()  # password: required",
        'parser.add_argument("--token", help="the token of the hub")',
        "if password != other_password: raise ValueError('the password is wrong')",
        "--max-tokens=16 --eos-token '</s>' --num-tokens 128",
        (
            "Basic understanding of the secret is needed; the key is"
            " under the mat, the token was lost."
        ),
        "cookie = cookies.get(name)  # Cookie: a small file",
        '{"type": "string", "password": "string", "token_count": 128, "max_tokens": 4096}',
        "sha256:" + "0123456789abcdef" * 4 + " commit 0123456789abcdef0123456789abcdef01234567",
        "10:30:22 step 000100 loss 0.123 ratio 1.0000 at 127.0.0.1:8000/v1",
        '{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}',
        "password=$PASSWORD --password=${DB_PASSWORD} Bearer $TOKEN <password>",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert Redactor().text(text) == text


def test_the_sources_of_this_project_stay() -> None:
    """A million characters of code: nothing but examples of a place is hidden."""
    finder, hidden = Redactor(), list[str]()
    for file in sorted((ROOT / "mlx_parallm").glob("*/*.py")):
        text = file.read_text(encoding="utf-8")
        hidden += [text[secret.start : secret.end] for secret in finder.find(text)]
    assert len(hidden) < 20 and {each for each in hidden if looks_random(each)} == set()


def test_personal_data_by_setting() -> None:
    texts = {
        "card 4111 1111 1111 1111.": "4111",
        "5555555555554444": "5555",
        "iban DE89 3704 0044 0532 0130 00": "3704",
        "GB82WEST12345698765432": "WEST",
        "to joe.doe+x@example.co.uk, please": "joe",
        "call +49 170 1234567 or (415) 555-2671": "555-2671",
        "+1-202-555-0143": "0143",
    }
    plain, personal = Redactor(), Redactor(forms=(*SECRET_FORMS, *PERSONAL_FORMS))
    for text, part in texts.items():
        assert plain.text(text) == text and part not in personal.text(text), text
    for text in (
        "4111 1111 1111 1112",
        "DE88 3704 0044 0532 0130 00",
        "1732550400000000",
        "a@b",
        "3.14159265358979",
    ):
        assert personal.text(text) == text
    assert (
        is_card("4111111111111111")
        and not is_card("0" * 16)
        and is_iban("GB82 WEST 1234 5698 7654 32")
    )


def test_a_hostile_text_takes_no_time() -> None:
    """What each form begins with, again and again: no search begins anew at every place and runs
    to the end."""
    finder = Redactor(forms=(*SECRET_FORMS, *PERSONAL_FORMS))
    beginnings = [
        "-----BEGIN PRIVATE KEY-----",
        "-eyJ",
        "-eyJaaaaaaaa",
        "-sk-",
        "key ",
        "secret is ",
        "://a",
        "a====",
        "curl ",
    ]
    beginnings += [
        "--a-",
        "login x ",
        "name: key ",
        "<a",
        "<token>",
        "1 ",
        "+1 ",
        "a@a.",
        "AA11 ",
        "cookie: a=",
        "mysql ",
    ]
    for beginning in beginnings:
        finder.find(beginning * (100_000 // len(beginning)))
