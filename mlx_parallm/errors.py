"""The error tree. Boundaries (CLI, HTTP, engine step, episode) catch `ParallmError`; everything
else is a bug.

ParallmError
├── ConfigError              a configuration that cannot work: key, fault, what would
│                            be right
├── ModelError               a checkpoint that cannot be loaded or served
│   └── AdapterError         an adapter that does not fit: file, module, shape
├── RequestError             a generation request that cannot be run (HTTP 400); carries `param` and
│                            `code`
│   ├── ContextLengthError   the prompt does not fit ("maximum context length")
│   ├── ModelNotFoundError   no such served model (HTTP 404)
│   ├── InvalidAnswerError   the model's answer does not match its schema or grammar, after all
│   │                        tries (HTTP 400)
│   └── RefusedError         an adapter, reward or rollback that cannot be accepted; carries
│                            HTTP's `status`
├── DeviceFaultError         the GPU has failed; carries `fault`, and the process ends with exit
│                            code 75
├── EngineUnavailableError   the engine is loading, draining or dead, or a loop thread has ended
│                            (HTTP 503)
├── GenerationFailedError    the engine gave one request up with its own error (HTTP 500);
│                            others continue
├── RolloutRejectedError     a scored group that may not be trained on; the reason is stored with it
├── StoreError               the rollout database cannot be opened, written or read (full disk,
│                            lock)
├── EndpointError            another server (OpenAI-compatible) cannot be reached or refuses;
│                            carries `status`
├── ToolFailedError          a tool could not do what a call requested; the policy reads the reason
├── SandboxError             the sandbox could not run code at all (not: code that failed in it)
├── CheckpointError          a checkpoint or run directory that cannot be written or read
├── TraceError               a trace, session or data set that cannot be read or written
├── PatternTimeoutError      a regular expression takes too long on a text
├── MemoryShortError         the process has ended in order because memory was running out;
│                            another one may continue
├── RankLostError            a rank of a distributed run has ended, or cannot be reached
│   └── RanksStandStillError a sum over the ranks did not end; another start may continue
└── PublishTimeoutError      could not get the weight lock within `lock_timeout_ms`; the old weights
                             keep serving
"""

EXIT_AGAIN = 75
"""The exit code of a process that has ended because something was short or stalled: another
one may continue from the newest checkpoint (EX_TEMPFAIL of sysexits.h)."""


class ParallmError(Exception):
    """Root of every error this package raises on purpose. Its text is one line fit for a user."""


class ConfigError(ParallmError):
    """A configuration that cannot work."""


class ModelError(ParallmError):
    """A checkpoint that cannot be loaded or served."""


class AdapterError(ModelError):
    """An adapter that does not fit the model."""


class RequestError(ParallmError):
    """A generation request that cannot be run. `param` names the offending field, `code`
    OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or prompt and max_tokens, exceed the model's context."""

    def __init__(
        self, prompt_tokens: int, max_model_len: int, max_tokens: int | None = None
    ) -> None:
        size = f"{prompt_tokens} prompt tokens" + (
            f" + {max_tokens} max_tokens" if max_tokens else ""
        )
        super().__init__(
            (
                f"This model's maximum context length is {max_model_len}"
                f" tokens, but the request has {size}."
            ),
            param="prompt",
            code="context_length_exceeded",
        )


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    def __init__(self, name: str, served: list[str], why: str = "") -> None:
        super().__init__(
            (
                f"The model {name!r} does not exist{why and ': '}{why}. Served models:"
                f" {', '.join(served)}."
            ),
            param="model",
            code="model_not_found",
        )


class RefusedError(RequestError):
    """A change that the server cannot make now: of an adapter, a reward, a rollback; `status` is
    HTTP's."""

    def __init__(self, message: str, status: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status


class InvalidAnswerError(RequestError):
    """The model's answer does not match its schema or grammar, however often it was sampled, or
    cannot continue within it."""


class EngineUnavailableError(ParallmError):
    """The engine is loading, draining or dead."""


class DeviceFaultError(ParallmError):
    """The GPU has failed, and nothing more is computed. `fault`: a `DeviceFault` of
    `system.device.faults`; `plan`: how the work continues."""

    def __init__(self, fault: object, plan: str = "") -> None:
        super().__init__(f"{fault}{plan and '. '}{plan}")
        self.fault = fault


class GenerationFailedError(ParallmError):
    """The engine gave one request up; other requests continue."""


def failure_of(error: str | None, code: str | None, param: str | None = None) -> ParallmError:
    """Return the error of a choice that ended with one. `code`: OpenAI's, if the request itself
    is its cause."""
    text = error or "the generation failed"
    if code is None:
        return GenerationFailedError(text)
    return InvalidAnswerError(text, param=param, code=code)


class RolloutRejectedError(ParallmError):
    """A scored group that may not be trained on."""


class EnvironmentFailedError(ParallmError):
    """In-process environments cannot continue: group after group fails, or their results cannot be
    kept."""


class StoreError(ParallmError):
    """The rollout database cannot be opened, written or read; nothing was half-written."""


class EndpointError(ParallmError):
    """Another server cannot be reached, or refuses a request; `status` is HTTP's, None without
    an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the server was away or busy, so that a later try may succeed."""
        return self.status in (None, 408, 429) or self.status >= 500


class SandboxError(ParallmError):
    """The sandbox could not run code at all; the code itself may be fine."""


class ToolFailedError(ParallmError):
    """A tool could not do what a call requested; the policy reads the text."""


class CheckpointError(ParallmError):
    """A checkpoint or run directory that cannot be written or read."""


class TraceError(ParallmError):
    """A trace, a session or a data set that cannot be read or written."""


class PatternTimeoutError(ParallmError):
    """A regular expression takes too long on a text; whether it matches is not known."""


class MemoryShortError(ParallmError):
    """The process has ended in order because memory was running out."""


class RankLostError(ParallmError):
    """A rank of a distributed run has ended, or cannot be reached; training cannot continue."""


class RanksStandStillError(RankLostError):
    """A sum over the ranks did not end within `rl_training.rank_timeout_s`."""


class PublishTimeoutError(ParallmError):
    """Could not get the weight lock in time; nothing changed."""
