"""The whole way of an export: open, write, verify, put in place, hand to Ollama.

A file that was verified and is not as here is not kept. Everything is written into a directory of a
temporary name, which is renamed at the end; leftovers of a killed export are removed by the next
one of the same name.

model.py           which model: a run, or a base with an adapter; its tensors, one at a time
architectures.py   the table of architectures: tensor names, rows in another order, metadata
vocabulary.py      the tokenizer as GGUF has it, and the name of its pre-tokenizer
quantization.py    the type of each tensor, and its bytes
gguf_file.py       write the file, one tensor in memory at a time; the adapter's file
llama_server.py    a real llama.cpp in its own process, and its HTTP API
verify.py          compare it with our own engine
ollama.py          the Modelfile, and Ollama's HTTP API
hosting.py         settings of a server by this machine's hardware
pipeline.py        the whole way; command.py is `mlx_parallm export`
"""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlx_parallm.deploy.export import llama_server, verify
from mlx_parallm.deploy.export.gguf_file import write_adapter, write_model, write_vocabulary
from mlx_parallm.deploy.export.hosting import OllamaHostingProfile, fitting_type, hosting_profile
from mlx_parallm.deploy.export.llama_server import LlamaServer
from mlx_parallm.deploy.export.model import (
    NO_TEMPLATE,
    ModelSource,
    OpenModel,
    open_model,
    source_of_run,
)
from mlx_parallm.deploy.export.ollama import DEFAULT_URL, OllamaDeployer, go_template, modelfile
from mlx_parallm.deploy.export.quantization import check_type, without_own_type
from mlx_parallm.deploy.export.verify import Verification, not_verified
from mlx_parallm.deploy.export.vocabulary import (
    STOPS_IN_FILE,
    Vocabulary,
    candidates,
    describe_rules,
    read_vocabulary,
)
from mlx_parallm.errors import ConfigError, EndpointError, ModelError
from mlx_parallm.models.gguf.architectures import architecture_of, check_arguments
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.files import TEMPORARY, remove_of_the_dead, write_directory
from mlx_parallm.system.hardware import detect, memory_present

REPORT_FILE = "export.json"
MODELFILE = "Modelfile"
LM_STUDIO = ".lmstudio"
LM_STUDIO_TARGET = "lmstudio"
MODELS = "models"
LM_STUDIO_POINTER = ".lmstudio-home-pointer"
PUBLISHER = "mlx-parallm"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Destination:
    """The destination of a file: a new directory, and perhaps Ollama under a name."""

    directory: Path
    ollama: str | None = None
    keep: bool = True
    lm_studio: bool = False


@dataclass(frozen=True)
class ExportReport:
    """The result of an export. `file` is None after it went to Ollama alone."""

    file: Path | None
    bytes: int
    types: dict[str, int]
    verification: Verification
    notes: tuple[str, ...]
    hosting: OllamaHostingProfile | None
    ollama: str | None = None

    def lines(self) -> list[str]:
        """Return the report in words."""
        types = ", ".join(f"{count} {kind}" for kind, count in self.types.items())
        lines = [f"{self.file}: {self.bytes:,} bytes, tensors: {types}"] if self.file else []
        lines += self.verification.lines()
        lines += [f"note: {note}" for note in self.notes]
        if self.ollama:
            lines.append(f"Ollama has it: ollama run {self.ollama}")
        if self.hosting and self.file:
            lines.append(f"serve it: {self.hosting.llama_server(str(self.file))}")
        return lines


@dataclass(frozen=True)
class ExportPipeline:
    """One export.

    Attributes:
        kind: of the weights: "f32", "f16", "bf16", "q8_0", "q4_k_m", …
        destination: from `destination_of`.
        adapter_only: the adapter for llama.cpp's `--lora`, in the place of the merged model.
        check: "auto": a llama.cpp of this machine; "off"; or the URL of a llama-server: then
            nothing is written, and its answers are compared with the model's.
        pre: llama.cpp's name of the pre-tokenizer, in the place of the one that is found.
        ollama_url: of `ollama serve`.
        say: called with each stage of the work.
    """

    source: ModelSource
    kind: str
    destination: Destination
    adapter_only: bool = False
    check: str = "auto"
    pre: str | None = None
    ollama_url: str = DEFAULT_URL
    say: Say = field(default=lambda line: None)

    def run(self) -> ExportReport:
        """Raises ModelError: the model cannot be GGUF, or the file is not as here, and is not
        kept; AdapterError; ConfigError; CheckpointError: the file cannot be written;
        EndpointError: Ollama, or the URL to verify with."""
        if self.check not in ("auto", "off"):
            return self._compare_only()
        directory = self.destination.directory
        if directory.exists() or directory.is_symlink():
            raise ConfigError(
                f"{directory} exists already: choose another --to, an"
                " export never replaces anything"
            )
        if self.destination.ollama and self.adapter_only:
            raise ConfigError("Ollama takes no adapter (since 0.34.1): leave --adapter-only out")
        if self.destination.lm_studio and self.adapter_only:
            raise ConfigError("LM Studio loads whole models only: leave --adapter-only out")
        if "/" in self.source.name or not self.source.name:
            raise ConfigError(f"--name {self.source.name!r}: it becomes a file's name, without /")
        deployer = OllamaDeployer(self.ollama_url) if self.destination.ollama else None
        if deployer is not None:
            self.say(f"Ollama {deployer.version()} at {deployer.url}")
        opened, vocabulary = self.check_source()
        made: list[ExportReport] = []
        remove_of_the_dead(directory.parent, f"{directory.name}{TEMPORARY}")
        write_directory(
            directory, lambda unfinished: made.append(self._fill(opened, vocabulary, unfinished))
        )
        return made[0] if deployer is None else self._deploy(deployer, made[0])

    def check_source(self) -> tuple[OpenModel, Vocabulary]:
        """Open the model; refuse here all that can be refused before anything is written. Raises
        ModelError."""
        check_type(self.kind)
        opened = open_model(self.source)
        return opened, self._vocabulary(opened)

    def _compare_only(self) -> ExportReport:
        opened = open_model(self.source)
        server = LlamaServer(self.check)
        try:
            verification = self._judged(self._compare(server, opened))
        finally:
            server.close()
        return ExportReport(None, 0, {}, verification, tuple(opened.notes), None)

    def _vocabulary(self, opened: OpenModel) -> Vocabulary:
        check_arguments(architecture_of(opened.config), opened.arguments)
        vocabulary = read_vocabulary(opened.tokenizer, opened.config, opened.path)
        if vocabulary.chat_template is None and self.source.chat_template != NO_TEMPLATE:
            raise ModelError(
                "the tokenizer has no chat template: llama.cpp would take another model's. Pass"
                " --chat-template FILE,"
                f" or --chat-template {NO_TEMPLATE} for a model that only continues texts"
            )
        if len(vocabulary.stops) > STOPS_IN_FILE:
            left = ", ".join(vocabulary.stop_texts()[STOPS_IN_FILE:])
            opened.notes.append(
                f"GGUF has room for {STOPS_IN_FILE} stop tokens: give llama.cpp {left} as stops too"
            )
        if self.pre is not None:
            return vocabulary.with_pre(self.pre)
        return (
            vocabulary
            if vocabulary.pre is not None
            else vocabulary.with_pre(self._try_pre(opened, vocabulary))
        )

    def _try_pre(self, opened: OpenModel, vocabulary: Vocabulary) -> str:
        """Return the pre-tokenizer with which a real llama.cpp gives the same token ids. Raises
        ModelError."""
        how = describe_rules(opened.tokenizer)
        rules = f"our table has no name of llama.cpp's for how this tokenizer splits texts ({how})"
        if self.check == "off" or not llama_server.available():
            raise ModelError(
                f"{rules}: `pip install xllamacpp` to have its own ones tried, or pass --pre NAME"
            )
        best, most = "", -1
        for pre in candidates():
            equal, all_ = _probe(vocabulary.with_pre(pre), opened.tokenizer)
            if equal == all_:
                opened.notes.append(
                    f"the pre-tokenizer {pre!r} was found by trying:"
                    f" {equal} of {all_} texts are equal"
                )
                return pre
            best, most = max((best, most), (pre, equal), key=lambda result: result[1])
        raise ModelError(
            f"{rules}, and none of its {len(candidates())} fits: the"
            f" best, {best!r}, fits {most} texts"
        )

    def _fill(self, opened: OpenModel, vocabulary: Vocabulary, directory: Path) -> ExportReport:
        arguments, layers = opened.arguments, len(opened.layers)
        parameters = sum(math.prod(shape) for shape in opened.shapes().values())
        file = directory / f"{self.source.name}-{'lora' if self.adapter_only else self.kind}.gguf"
        self.say(f"writing {self.destination.directory / file.name}")
        if self.adapter_only:
            types = {"F32": 2 * write_adapter(file, opened)}
        else:
            types = write_model(file, opened, vocabulary, self.kind)
            if without := without_own_type(self.kind, types):
                opened.notes.append(without)
        verification = self._judged(self._verify(opened, vocabulary, file))
        size, memory, hosting = file.stat().st_size, memory_present()[1], None
        if not self.adapter_only:
            hosting = hosting_profile(detect(), size, arguments, memory=memory)
            better = fitting_type(parameters, memory)
            if hosting.note:
                hint = f"; --type {better} would" if better and better != self.kind else ""
                opened.notes.append(hosting.note + hint)
            text = modelfile(
                file.name,
                vocabulary.stop_texts(),
                go_template(opened.tokenizer),
                _parameters(vocabulary, hosting),
            )
            (directory / MODELFILE).write_text(text, encoding="utf-8")
        document = {
            "file": file.name,
            "model": self.source.base,
            "adapter": str(self.source.adapter) if self.source.adapter else None,
            "adapted_layers": layers,
            "type": self.kind,
            "tensors": types,
            "pre_tokenizer": vocabulary.pre,
            "stops": vocabulary.stop_texts(),
            "verification": verification.to_json(),
            "template": go_template(opened.tokenizer),
            "parameters": _parameters(vocabulary, hosting) if hosting else {},
            "hosting": {**hosting.to_json(), "env": hosting.to_env()} if hosting else None,
            "notes": opened.notes,
        }
        (directory / REPORT_FILE).write_text(
            json.dumps(document, indent=2) + "\n", encoding="utf-8"
        )
        final = self.destination.directory / file.name
        return ExportReport(final, size, types, verification, tuple(opened.notes), hosting)

    def _verify(self, opened: OpenModel, vocabulary: Vocabulary, file: Path) -> Verification:
        if self.check == "off":
            return not_verified("--verify off")
        if not llama_server.available():
            return not_verified(
                "no llama.cpp here: `pip install xllamacpp`, or put llama-server on the PATH"
            )
        with ExitStack() as stack:
            adapter = None
            if self.adapter_only:  # llama.cpp adds it to the base, in a file for this alone
                file, adapter = file.with_name("base.gguf"), file
                stack.callback(file.unlink, missing_ok=True)
                write_model(file, replace(opened, adapter=None), vocabulary, self.kind)
            self.say("verifying with llama.cpp")
            server = stack.enter_context(llama_server.running(file, adapter))
            return self._compare(server, opened)

    def _compare(self, server: LlamaServer, opened: OpenModel) -> Verification:
        rounding = architecture_of(opened.config).rounding
        return verify.verify(
            server,
            self.source,
            self.kind,
            opened.tokenizer,
            rounding,
            adapter_apart=self.adapter_only,
            say=self.say,
        )

    def _judged(self, verification: Verification) -> Verification:
        """Raises ModelError: it was compared, and is not as here."""
        if verification.by is not None and not verification.passed:
            for line in verification.lines():
                self.say(line)
            faults = "; ".join(verification.faults)
            kept = "it was not kept" if self.check == "auto" else f"at {self.check}"
            raise ModelError(f"the file is not the model that is served here ({kept}): {faults}")
        return verification

    def _deploy(self, deployer: OllamaDeployer, report: ExportReport) -> ExportReport:
        name, file = self.destination.ollama, report.file
        assert name is not None and file is not None
        try:
            deploy_directory(deployer, file.parent, name, self.say)
        except EndpointError as error:
            raise EndpointError(f"{error}. The file is in {file.parent}") from error
        finally:
            deployer.close()
        if self.destination.keep:
            return replace(report, ollama=name)
        shutil.rmtree(file.parent)
        return replace(report, ollama=name, file=None)


@dataclass(frozen=True)
class GGUFExporter:
    """A model or a run as GGUF files: `GGUFExporter("checkpoints/first").convert("f16")`.

    Attributes:
        model: a run directory or one of its steps; a model's directory, hub id or "builtin:tiny".
        output_dir: gets a directory NAME-TYPE-gguf for each type.
    """

    model: str
    output_dir: str | Path = "."
    name: str = "model"

    def convert(self, quantization: str = "q8_0", *, check: str = "auto") -> Path:
        """Return the file. Raises what `ExportPipeline.run` raises: it is verified, and no other
        type is taken."""
        path, kind = Path(self.model).expanduser(), quantization.lower()
        of_run = path.is_dir() and not (path / "tokenizer_config.json").is_file()
        source = (
            source_of_run(path, name=self.name)
            if of_run
            else ModelSource(self.model, None, self.name)
        )
        place = Destination(Path(self.output_dir).expanduser() / f"{self.name}-{kind}-gguf")
        file = ExportPipeline(source, kind, place, check=check).run().file
        assert file is not None
        return file


def deploy_directory(
    deployer: OllamaDeployer, directory: Path, name: str, say: Say = lambda line: None
) -> None:
    """Make an Ollama model of an export's directory. Raises EndpointError; ModelError: this is
    no export's."""
    try:
        about = json.loads((directory / REPORT_FILE).read_text(encoding="utf-8"))
        file, stops = directory / about["file"], about["stops"]
        template, parameters = about["template"], about["parameters"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{directory} was not written by `mlx_parallm export`: {error}"
        raise ModelError(problem) from error
    deployer.create(name, file, stops=stops, template=template, parameters=parameters, progress=say)


def destination_of(targets: Sequence[str], source: ModelSource, kind: str) -> Destination:
    """Return where `--to` puts an export: `ollama:NAME`, `lmstudio[:PUBLISHER/MODEL]`, or a
    directory. Without a
    directory: one in the run's, or of a base in the current one.

    Raises ConfigError: an empty or doubled target.
    """
    directories, models, name = [], [], source.name
    for target in targets:
        scheme, _, rest = target.partition(":")
        if scheme == "ollama":
            models.append(rest)
        elif scheme == LM_STUDIO_TARGET:
            directories.append(lm_studio_directory(rest or f"{PUBLISHER}/{name}"))
        else:
            directories.append(Path(target))
    if len(directories) > 1 or len(models) > 1 or "" in models:
        raise ConfigError(
            "--to: at most one directory or lmstudio, and one ollama:NAME, such as ollama:my-model"
        )
    keep = bool(directories) or not models
    directory = directories[0] if directories else (source.run or Path()) / f"{name}-{kind}-gguf"
    lm_studio = any(target.partition(":")[0] == LM_STUDIO_TARGET for target in targets)
    return Destination(directory.expanduser(), models[0] if models else None, keep, lm_studio)


def lm_studio_directory(model: str) -> Path:
    """Return LM Studio's directory of "PUBLISHER/MODEL": it looks for files exactly two
    directories down."""
    parts = model.split("/")
    if len(parts) != 2 or not all(parts):
        raise ConfigError(f"--to lmstudio:{model}: expected lmstudio:PUBLISHER/MODEL")
    pointer = Path.home() / LM_STUDIO_POINTER
    home = (
        Path(pointer.read_text(encoding="utf-8").strip())
        if pointer.is_file()
        else Path.home() / LM_STUDIO
    )
    return (home / MODELS).joinpath(*parts)


def _parameters(vocabulary: Vocabulary, hosting: OllamaHostingProfile) -> dict[str, float]:
    """Return Ollama's parameters of the model."""
    names = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k"}
    sampling = {names[name]: value for name, value in vocabulary.sampling.items()}
    return {**sampling, **hosting.parameters()}


def _probe(vocabulary: Vocabulary, tokenizer: Tokenizer) -> tuple[int, int]:
    """Return how many texts a real llama.cpp splits as the tokenizer does, of how many."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "vocabulary.gguf")
        write_vocabulary(file, vocabulary)
        with llama_server.running(file) as server:
            return verify.compare_texts(server, tokenizer, [])
