"""How secrets look: a table of forms, one line for each issuer's keys and for each place where a
secret stands.

The formats are those that the issuers document (and that public scanners list). `detect-secrets`,
the only scanner that is a Python library, was tried and left out: its last release is of May 2024,
it reads a text line by line, and it knows SendGrid, Twilio, Discord and Telegram of the kinds below
that agents' logs hold, but not DigitalOcean, Shopify, Databricks, Notion, Groq, xAI, Replicate or
Vault.
"""

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SecretForm:
    """The form of a kind of secret. `hints`: one of these texts is in every match, in any
    case, so that most texts need no search. The secret is the pattern's group "secret", or the
    whole match. `check`: a match is a secret only if it returns True. `in_run`: every match has
    LONG_RUN signs of `RUN` in a row, so the search needs only the runs of a text, a tenth."""

    kind: str
    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    check: Callable[[str], bool] | None = None
    in_run: bool = False


LONG_RUN = 15
RUN = re.compile(
    rf"(?:\\[nrt])?[A-Za-z0-9_.+/=:-]{{{LONG_RUN},}}"
)  # a line break in JSON within JSON is not part of a key
_CHARACTER_CLASSES = re.compile(r"[a-z]+|[A-Z]+|[0-9]+|[^A-Za-z0-9]+")
# of the character class, for each character: random base64 has 0.6, hexadecimal 0.45, names 0.15
_LEAST_CHANGES = 0.3
# characters, and bits a character, of a long value whose classes change less often
_LONG, _LEAST_ENTROPY = 32, 3.5


def looks_random(text: str) -> bool:
    """Whether letters and digits change as often as in a random text, or a long one uses many
    characters evenly."""
    letters = sum(map(str.isalpha, text))
    if letters < 3 or (len(text) < _LONG and not any(map(str.isdigit, text))):
        return False
    changes = (len(_CHARACTER_CLASSES.findall(text)) - 1) / len(text)
    if changes >= _LEAST_CHANGES:
        return True
    words = max(map(len, re.findall(r"[a-z]+", text)), default=0)
    return (
        len(text) >= _LONG
        and words <= 6
        and changes >= _LEAST_CHANGES / 2
        and _entropy(text) >= _LEAST_ENTROPY
    )


def _entropy(text: str) -> float:
    """Bits a character."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


_NO_PASSWORD = re.compile(
    r"(?:x{3,}|\*+|\.{3,}|_+|-+|none|null|nil|true|false|undefined|string|str|text|bytes|password\d?|passwd|secret|token"
    r"|required|optional|hidden|redacted|changeme|your.*|my_?password|example.*|placeholder|secretstr|any|unknown|default"
    r"|(?:new|old|current|confirm|reset|forgot)_?-?password|authentication)",
    re.IGNORECASE,
)
_IDENTIFIER = re.compile(
    r"(?:[a-z][a-z0-9]*_[a-z0-9_]*|_[a-z0-9_]+|[A-Z][A-Z0-9]*_[A-Z0-9_]+|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)"
)
_ODD = re.compile(r"[^A-Za-z]")
LONG_WORD = 12  # letters of a password that is one word


def is_password(text: str) -> bool:
    """Whether a value that is named a password may be one: no placeholder, no name of a
    variable, no type."""
    if len(text) < 4 or _NO_PASSWORD.fullmatch(text) or _IDENTIFIER.fullmatch(text):
        return False
    return bool(_ODD.search(text)) or len(text) >= LONG_WORD


def _is_basic(text: str) -> bool:
    """Whether it is NAME:PASSWORD in base64."""
    try:
        return b":" in base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return False


def form(
    kind: str,
    hints: str,
    pattern: str,
    flags: int = 0,
    *,
    check: Callable[[str], bool] | None = None,
) -> SecretForm:
    return SecretForm(kind, tuple(hints.split()), re.compile(pattern, flags), check)


_ANY_CASE = re.IGNORECASE
_START, _END = r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrt]))", r"(?![A-Za-z0-9])"
# of something that holds a secret: the last part of an option's, a variable's, a key's name
_NAME = (
    r"(?:pass(?:word|wd|phrase|code)?|pwd|secret|token|credentials?|(?:api|access|secret|private|signing|encryption"
    r"|account|auth|subscription|storage|master|session|client|service)[_-]?key|(?:client|app|webhook|jwt|signing)"
    r"[_-]?secret)"
)
_PASSWORD_NAME = (
    r"(?:pass(?:word|wd|phrase)|pwd|passwor[dt]|kennwort|mot de passe|contrase(?:ñ|n)a|senha|wachtwoord"
    r"|lösenord|парол[ья]|密码|密碼|パスワード)"
)
_VOCABULARY = "(?:end|eos|bos|pad|unk|mask|sep|cls|stop|start|image)"  # kinds of tokens
_PASSWORD_HINTS = "pass pwd kennwort contrase senha wachtwoord lösenord парол 密码 密碼 パスワード"
_KEY_NAME = r"(?:(?:api|access|secret|private|auth)[_-]?(?:key|token)|secret|token)"
_QUOTE = r"(?:\\{0,3}[\"'])"  # in JSON within JSON too
_VALUE = r"[^\s\"'\\,;{}()<>$\[\]|&`]{4,512}"  # without quotes


def _prefixed(kind: str, *patterns: str) -> SecretForm:
    """Keys that begin with their own text: the part of each pattern before the first sign
    of a regex."""
    hints = {re.split(r"[\[(\\?{|]", pattern)[0].lower() for pattern in patterns}
    assert all(len(hint) >= 3 for hint in hints), (
        f"{kind}: a pattern begins with three plain characters"
    )
    return SecretForm(
        kind,
        tuple(sorted(hints)),
        re.compile(rf"{_START}(?:{'|'.join(patterns)}){_END}"),
        None,
        True,
    )


def _issued(
    kind: str,
    hints: str,
    pattern: str,
    flags: int = 0,
    *,
    check: Callable[[str], bool] | None = None,
) -> SecretForm:
    return SecretForm(
        kind,
        tuple(hints.split()),
        re.compile(re.sub(r"(?:(?<=\|)|^)\\b", lambda _: _START, pattern), flags),
        check,
        in_run=True,
    )


_ISSUERS: tuple[SecretForm, ...] = (
    _prefixed("huggingface", "hf_[A-Za-z0-9]{12,}", "api_org_[A-Za-z0-9]{20,}"),
    _prefixed("anthropic", "sk-ant-[A-Za-z0-9_-]{12,}"),
    _issued(
        "openai",
        "sk-",
        r"\bsk-(?:[A-Za-z0-9_]{12,}[A-Za-z0-9_-]*|(?=[A-Za-z_-]{0,64}\d)[A-Za-z0-9_-]{16,})",
    ),
    _prefixed("tinker", r"tml-[A-Za-z0-9_-]{12,}"),
    _prefixed("groq", "gsk_[A-Za-z0-9]{20,}"),
    _prefixed("xai", "xai-[A-Za-z0-9_-]{20,}"),
    _prefixed("replicate", "r8_[A-Za-z0-9]{20,}"),
    _prefixed("perplexity", "pplx-[A-Za-z0-9]{20,}"),
    _prefixed("nvidia", "nvapi-[A-Za-z0-9_-]{20,}"),
    _prefixed("together", "tgp_v1_[A-Za-z0-9_-]{20,}"),
    _prefixed("fireworks", "fw_[A-Za-z0-9]{20,}"),
    _prefixed("cerebras", "csk-[A-Za-z0-9]{20,}"),
    _prefixed("tavily", "tvly-[A-Za-z0-9_-]{16,}"),
    _prefixed("langsmith", "lsv2_[a-z]{2}_[A-Za-z0-9_]{20,}"),
    _prefixed("langfuse", "sk-lf-[A-Za-z0-9-]{16,}"),
    _prefixed("pinecone", "pcsk_[A-Za-z0-9_]{20,}"),
    _prefixed("runpod", "rpa_[A-Za-z0-9]{20,}"),
    _prefixed("wandb", r"wandb_v1_\w{12,}"),
    _prefixed("databricks", r"dapi[a-f0-9]{32}(?:-\d+)?", r"dose[a-f0-9]{32}"),
    _issued("aws", "akia asia abia acca", r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"),
    _issued(
        "github",
        "ghp_ gho_ ghu_ ghs_ ghr_ _pat_",
        r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
    ),
    _issued(
        "gitlab",
        "gl",
        r"\b(?:gl(?:pat|dt|rt|ft|soat|cbt|oas|ptt|imt|agent|ffct)-[A-Za-z0-9_-]{20,}|GR1348941[\w-]{20,})",
    ),
    _issued(
        "slack",
        "xox hooks.slack.com xapp- xoxe.",
        r"\bxox[abeprs][.-][A-Za-z0-9.-]{10,}|\bxapp-[A-Za-z0-9-]{20,}"
        r"|hooks\.slack\.com/(?:services|workflows|triggers)/(?P<secret>[A-Z0-9]+/[A-Z0-9]+/[A-Za-z0-9/]{16,})",
    ),
    _issued(
        "google",
        "aiza ya29. gocspx- 1//0",
        r"\bAIza[A-Za-z0-9_-]{35}|\bya29\.[A-Za-z0-9_-]{20,}|\bGOCSPX-[A-Za-z0-9_-]{20,}|\b1//0[A-Za-z0-9_-]{35,}",
    ),
    _issued(
        "stripe",
        "_live_ _test_ whsec_",
        r"\b(?:[spr]k_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[A-Za-z0-9+/=]{20,})",
    ),
    _issued("sendgrid", "sg.", r"\bSG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64}"),
    _issued("twilio", "sk ac", r"\b(?:SK|AC)[0-9a-f]{32}\b"),
    _issued(
        "discord",
        "discord .",
        r"discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d{5,}/(?P<secret>[A-Za-z0-9_-]{30,})"
        r"|\b[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40}",
    ),
    _issued(
        "telegram",
        ":",
        r"(?<![\w.:-])(?:bot)?\d{8,10}:[A-Za-z0-9_-]{34,36}(?![\w-])",
        check=looks_random,
    ),
    _prefixed(
        "digitalocean", "dop_v1_[a-f0-9]{32,}", "doo_v1_[a-f0-9]{32,}", "dor_v1_[a-f0-9]{32,}"
    ),
    _issued("shopify", "shp", r"\bshp(?:at|ca|pa|ss)_[a-fA-F0-9]{32,}"),
    _prefixed("notion", "secret_[A-Za-z0-9]{43}", "ntn_[A-Za-z0-9]{30,}"),
    _issued("vault", "hvs. hvb. hvr.", r"\bhv[sbr]\.[A-Za-z0-9_-]{20,}"),
    _issued("vault", "s.", r"(?<![\w.])[sbr]\.[A-Za-z0-9]{24}(?![\w.])", check=looks_random),
    _prefixed("npm", "npm_[A-Za-z0-9]{36}"),
    _prefixed("pypi", "pypi-[A-Za-z0-9_-]{40,}"),
    _prefixed("rubygems", "rubygems_[a-f0-9]{48}"),
    _prefixed("docker", "dckr_pat_[A-Za-z0-9_-]{20,}"),
    _prefixed("linear", "lin_api_[A-Za-z0-9]{32,}"),
    _prefixed("postman", "PMAK-[a-f0-9]{24}-[a-f0-9]{34}"),
    _prefixed("figma", "figd_[A-Za-z0-9_-]{20,}"),
    _issued("airtable", "pat", r"\bpat[A-Za-z0-9]{14}\.[a-f0-9]{64}\b"),
    _prefixed(
        "atlassian",
        "ATATT3[A-Za-z0-9_=-]{20,}",
        "ATCTT3[A-Za-z0-9_=-]{20,}",
        "ATBB[A-Za-z0-9_=-]{24,}",
    ),
    _issued("doppler", "dp.", r"\bdp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9_.-]{20,}"),
    _prefixed("planetscale", r"pscale_[a-z]{2,5}_[A-Za-z0-9_.=-]{20,}"),
    _prefixed("sentry", "sntrys_[A-Za-z0-9+/=_-]{20,}", "sntryu_[a-f0-9]{64}"),
    _prefixed("newrelic", "NRAK-[A-Z0-9]{20,}", "NRJS-[a-f0-9]{19}", "NRII-[A-Za-z0-9_-]{32}"),
    _prefixed("grafana", "glsa_[A-Za-z0-9_]{30,}", "glc_[A-Za-z0-9+/=]{32,}"),
    _issued("mailgun", "key-", r"\bkey-[a-f0-9]{32}\b"),
    _issued("mailchimp", "-us", r"\b[a-f0-9]{32}-us\d{1,2}\b"),
    _issued(
        "square",
        "sq0 eaaa",
        r"\b(?:sq0(?:atp|csp|idp)-[A-Za-z0-9_-]{20,}|EAAA[A-Za-z0-9+=_-]{56,})",
    ),
    _issued("facebook", "eaa", r"\bEAA[A-Za-z0-9]{40,}"),
    _issued("terraform", ".atlasv1.", r"\b[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{50,}"),
    _prefixed("age", "AGE-SECRET-KEY-1[A-Z0-9]{50,}"),
    _prefixed("artifactory", "AKCp[A-Za-z0-9]{60,}"),
    _prefixed("alibaba", "LTAI[A-Za-z0-9]{16,}"),
    _prefixed("pulumi", "pul-[a-f0-9]{40}"),
    _prefixed("prefect", "pnu_[A-Za-z0-9]{36}"),
    _prefixed("supabase", "sbp_[a-f0-9]{40}", "sb_secret_[A-Za-z0-9_-]{20,}"),
    _prefixed("neon", "napi_[A-Za-z0-9]{40,}"),
    _prefixed("netlify", "nfp_[A-Za-z0-9]{30,}"),
    _prefixed("heroku", "HRKU-[A-Za-z0-9_-]{30,}"),
    _prefixed(
        "flyio",
        "fm1_[A-Za-z0-9+/=_-]{40,}",
        "fm2_[A-Za-z0-9+/=_-]{40,}",
        "fo1_[A-Za-z0-9_-]{40,}",
    ),
    _prefixed("resend", r"re_[A-Za-z0-9]{8}_[A-Za-z0-9]{20,}"),
    _prefixed("brevo", "xkeysib-[a-f0-9]{64}-[A-Za-z0-9]{16}"),
    _issued("hubspot", "pat-", r"\bpat-[a-z]{2}\d-[0-9a-f]{8}-[0-9a-f-]{27}"),
    _prefixed("buildkite", "bkua_[a-z0-9]{40}"),
    _issued("sonarqube", "sqp_ squ_ sqa_", r"\bsq[pua]_[a-z0-9]{40}\b"),
    _prefixed("onepassword", "ops_eyJ[A-Za-z0-9+/=]{40,}"),
    _issued(
        "mapbox", "sk.eyj tk.eyj pk.eyj", r"\b[spt]k\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"
    ),
    _prefixed("kaggle", "KGAT_[A-Za-z0-9]{20,}"),
    _issued("dropbox", "sl.", r"\bsl\.[A-Za-z0-9_-]{100,}"),
    _prefixed("elevenlabs", "sk_[a-f0-9]{48}"),
    _issued("jwt", "eyj", r"(?<![\w-])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
)

_PLACES: tuple[SecretForm, ...] = (
    form(
        "private_key",
        "-----begin",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
        r"(?:(?:(?!-----BEGIN)(?s:.))*?-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\s\\:,-]*)",
    ),
    form("url_password", "://", r"://(?P<secret>[^/\s@'\"<>{}$]+)@"),
    form(
        "url_key",
        "key= token= sig= signature= secret= password= pwd= credential=",
        r"(?:[?&#;]|&amp;|\\u0026)(?:[a-z_-]*(?:key|token|secret|password|passwd|pwd|signature)|sig|x-amz-credential)"
        r"=(?P<secret>[^&\s'\"<>{}$\\#]+)",
        _ANY_CASE,
        check=lambda text: len(text) >= 3,
    ),
    form(
        "signature",
        "signature",
        r"\b(?:x-amz-signature|x-goog-signature|x-hub-signature(?:-256)?|signature)\s*[:=]\s*"
        r"(?P<secret>(?:sha\d+=)?[A-Fa-f0-9]{32,}|[A-Za-z0-9+/%]{40,}={0,2})",
        _ANY_CASE,
    ),
    form(
        "bearer",
        "bearer",
        r"\bbearer\s+(?P<secret>(?=\S{0,200}\d|\S{20})[^\s'\",$<>{}\\]{6,})",
        _ANY_CASE,
    ),
    form(
        "basic",
        "basic",
        r"\bbasic\s+(?P<secret>[A-Za-z0-9+/]{8,}={0,2})",
        _ANY_CASE,
        check=_is_basic,
    ),
    form(
        "authorization",
        "authorization",
        rf"authorization{_QUOTE}?\s*[:=]\s*{_QUOTE}?(?:[a-z][\w-]{{0,40}}\s+)?"
        r"(?P<secret>(?=\S{0,200}\d|\S{20})[^\s'\",$<>{}\\()\[\]]{8,})",
        _ANY_CASE,
    ),
    form(
        "cookie",
        "cookie",
        rf"cookie{_QUOTE}?\s*[:=\s]\s*{_QUOTE}?"
        r"(?P<secret>[\w.!%*-]+=[^\s;,\"'(){}<>$\\\[\]]{4,}(?:;\s*[\w.!%*-]+(?:=[^\s;\"'(){}<>$\\]*)?)*)",
        _ANY_CASE,
        check=lambda text: bool(re.search(r"=(?=[^;]{0,200}\d|[^;]{12})[^;]{4,}", text)),
    ),
    form(
        "cookie",
        "curl",
        r"\bcurl\b[^\n|]{0,400}?\s(?:-b|--cookie)[ =]?[\"']?(?P<secret>[\w.-]+=[^\"'\n]+?)(?=[\"'\s]|$)",
    ),
    form(
        "command_password",
        "curl wget http",
        r"\b(?:curl|wget|http)\b(?!:)[^\n|]{0,400}?\s(?:-u|-U|--user|--proxy-user|-a|--auth)[ =]?[\"']?"
        r"[^\s:\"'/]+:(?P<secret>[^\s\"'/][^\s\"']*)",
    ),
    form(
        "command_password",
        "mysql sshpass redis-cli mariadb login",
        r"\b(?:mysql\w*|mariadb\w*|sshpass|redis-cli|(?:docker|podman|helm|az|npm)\s+(?:registry\s+)?login)\b"
        rf"[^\n|]{{0,300}}?\s(?:-p|-a)\s?[\"']?(?P<secret>{_VALUE})",
        check=is_password,
    ),
    form(
        "option",
        "--",
        rf"(?<![\w-])--(?:[a-z]+[_-])*{_NAME}(?:(?:=|\s+){_QUOTE}?|{_QUOTE}\s*,\s*{_QUOTE}(?!-))"
        rf"(?P<secret>[^\s\"'\\,;{{}}()<>$\[\]|&`]{{4,512}})",
        _ANY_CASE,
        check=is_password,
    ),
    form(
        "netrc",
        "password",
        r"\b(?:login|account|user)\s+\S{1,256}\s+password\s+(?P<secret>[^\s\"'<>{}$]{4,})",
        _ANY_CASE,
        check=is_password,
    ),
    form(
        "password",
        _PASSWORD_HINTS,
        rf"(?:{_PASSWORD_NAME}|(?<=_)pass){_QUOTE}?\s{{0,4}}(?:[:=：＝是为為は]|=>|:=){{1,2}}\s{{0,4}}"
        rf"(?:{_QUOTE}(?P<quoted>[^\s\"'\\]{{4,512}}){_QUOTE}|(?P<secret>{_VALUE})(?=[\s,;\"'}}\\&|`]|$))",
        _ANY_CASE,
        check=is_password,
    ),
    form(
        "password",
        _PASSWORD_HINTS,
        rf"\b{_PASSWORD_NAME}{_QUOTE}?(?:\s{{1,4}}(?:for|to|of|für|zu)(?:\s{{1,4}}[^\s.]{{1,64}}){{1,4}}?)?\s{{1,4}}(?:is|was|ist|lautet|war|es|est|é)"
        rf"(?:\s{{1,4}}now)?:?\s{{1,4}}(?:{_QUOTE}|`)?(?P<secret>{_VALUE}?)(?=[.!?,]?(?:[\s\"'`]|$))",
        _ANY_CASE,
        check=lambda text: is_password(text) and bool(_ODD.search(text.rstrip(".!?"))),
    ),
    form(
        "secret",
        "key token secret",
        rf"{_QUOTE}(?!{_VOCABULARY}_token)(?:[\w.-]{{0,40}}[_.-])?{_KEY_NAME}{_QUOTE}\s{{0,4}}:\s{{0,4}}{_QUOTE}(?P<secret>[^\s\"'\\]{{6,4096}}){_QUOTE}",
        _ANY_CASE,
        check=is_password,
    ),
    form(
        "command_password",
        "login",
        r"\b(?:wandb|huggingface-cli|hf(?:\s+auth)?|heroku|fly|vercel|neptune|comet)\s+login\s+(?:--?[\w-]+\s+)*"
        r"(?P<secret>[A-Za-z0-9_-]{8,})",
        check=lambda text: any(map(str.isdigit, text)) and not text.startswith("-"),
    ),
    form(
        "docker",
        "auth",
        rf"{_QUOTE}(?:auth|identitytoken|registrytoken){_QUOTE}\s*:\s*{_QUOTE}(?P<secret>[A-Za-z0-9+/_.=-]{{8,}}){_QUOTE}",
    ),
    form(
        "pgpass",
        ":",
        r"(?m)^(?:[\w.*-]+|\*):(?:\d{2,5}|\*):[\w.*-]+:[\w.*@-]+:(?P<secret>[^\s:]{4,256})\s*$",
    ),
    form(
        "htpasswd",
        ":$ :{",
        r":(?P<secret>\$(?:apr1|2[abxy]|1|5|6|y|argon2\w*)\$[\w./$,=+-]{8,}|\{(?:SHA|SSHA)\}[A-Za-z0-9+/=]{20,})",
    ),
    form(
        "password",
        "</",
        rf"<(?P<tag>[\w:.-]{{0,80}}{_NAME})>(?P<secret>[^<>\s]{{4,512}})</(?P=tag)>",
        _ANY_CASE,
        check=is_password,
    ),
    form(
        "named_value",
        "value",
        rf"(?:name|key){_QUOTE}?\s*[:=]\s*{_QUOTE}?[\w.-]{{0,80}}{_NAME}{_QUOTE}?\s*(?:,\s*|\s+)"
        rf"{_QUOTE}?value{_QUOTE}?\s*[:=]\s*{_QUOTE}?(?P<secret>[^\s\"'\\,}}]{{4,4096}})",
        _ANY_CASE,
        check=is_password,
    ),
    form(
        "named_value",
        "value",
        rf"{_QUOTE}value{_QUOTE}\s*:\s*{_QUOTE}(?P<secret>[^\s\"'\\]{{4,4096}}){_QUOTE}\s*,\s*"
        rf"{_QUOTE}(?:name|key){_QUOTE}\s*:\s*{_QUOTE}[\w.-]{{0,80}}{_NAME}{_QUOTE}",
        _ANY_CASE,
        check=is_password,
    ),
    form(
        "secret",
        "key secret token passw pwd credential",
        rf"(?:key|secret|token|passw(?:or)?d|pwd|credentials?){_QUOTE}?"
        rf"(?:(?:\s{{1,4}}(?:access|key|is|was|of|value)){{0,3}}\s{{0,4}}(?:[:=]|=>){{1,2}}\s{{0,4}}|(?:\s{{1,4}}(?:access|key|is|was|value)){{0,3}}\s)"
        rf"(?:{_QUOTE}|`|<)?(?P<secret>[A-Za-z0-9+/_~.-]{{16,}}={{0,2}})",
        _ANY_CASE,
        check=lambda text: looks_random(text) and not _IDENTIFIER.fullmatch(text),
    ),
)
SECRET_FORMS: tuple[SecretForm, ...] = (*_PLACES[:2], *_ISSUERS, *_PLACES[2:])


# ---------------------------------------------------------------------- personal data, where it is
# asked for


def is_card(text: str) -> bool:
    """Luhn's sum of a payment card's number."""
    digits = [int(digit) for digit in text if digit.isdigit()]
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (
        13 <= len(digits) <= 19
        and len(set(digits)) > 1
        and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0
    )


def is_iban(text: str) -> bool:
    """The remainder by 97 of an account's number (ISO 13616)."""
    plain = text.replace(" ", "").upper()
    number = "".join(str(int(sign, 36)) for sign in plain[4:] + plain[:4])
    return 15 <= len(plain) <= 34 and int(number) % 97 == 1


def _is_phone(text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


PERSONAL_FORMS: tuple[SecretForm, ...] = (
    form(
        "email",
        "@",
        r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,24}(?![\w-])",
    ),
    SecretForm(
        "iban",
        (),
        re.compile(
            r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"
        ),
        is_iban,
    ),
    SecretForm(
        "card", (), re.compile(r"(?<![\w.-])[2-6]\d{3}(?:[ -]?\d{2,6}){2,4}(?![\w-]|\.\d)"), is_card
    ),
    SecretForm(
        "phone",
        (),
        re.compile(
            r"(?<![\w.+/-])(?:\+\d{1,3}[ .-]?(?:\(0?\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,5}){1,4}"
            r"|\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-]|\.\d)"
        ),
        _is_phone,
    ),
)
"""E-mail addresses, IBANs, payment cards, phone numbers. No hints: they are always searched for."""
