"""The watchers of a run: display, server, logs of tokens, spans and samples, trackers, disk. Each
subscribes to its `RunEvents`; a new one is a line of `watch`."""

from mlx_parallm.engine.client import CLIENTS
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.data.heldout_rows import describe
from mlx_parallm.rl_training.events import (
    CheckpointSaved,
    Noted,
    RolledBack,
    SamplesWritten,
    StepFinished,
    WeightsPublished,
)
from mlx_parallm.rl_training.monitor.display import TrainingDisplay
from mlx_parallm.rl_training.monitor.readable import without_template
from mlx_parallm.rl_training.monitor.recording import TokenLog, record_spans
from mlx_parallm.rl_training.monitor.trackers import TrackedRun, Trackers
from mlx_parallm.rl_training.run.start import StartedRun
from mlx_parallm.run_files.samples import SAMPLES_FILE, SampleLog
from mlx_parallm.system.files import GB


def watch(started: StartedRun) -> None:
    """Subscribe everything that watches the run; they are closed with it."""
    prepared, opened = started.prepared, started.opened
    events, closing, serving = prepared.events, prepared.closing, prepared.serving
    tokenizer = serving.tokenizer()
    _subscribe_display(started, tokenizer)
    if started.heldout is not None and started.first_step == 0:
        events.emit(Noted(f"held-out rows before training: {describe(started.heldout.before())}"))
    events.subscribe(WeightsPublished, lambda event: serving.observe_publish(event.report))
    started.memory.subscribe(events)
    events.subscribe(
        RolledBack, lambda event: started.commands.mark("rollback", f"rolled back to {event.to}")
    )
    most_bytes = round(started.config.logging.tokens_gb * GB)
    token_log = TokenLog(opened.path, step=started.first_step, most_bytes=most_bytes)
    closing.callback(token_log.close)
    token_log.subscribe(events)
    record_spans(events, opened.spans)
    closing.callback(opened.spans.flush)
    _subscribe_samples(started, tokenizer)
    _subscribe_trackers(started)
    events.subscribe(CheckpointSaved, lambda event: opened.disk.prune())


def _subscribe_display(started: StartedRun, tokenizer: Tokenizer) -> None:
    prepared, serving = started.prepared, started.prepared.serving

    def health() -> list[str | None]:
        # then nothing else is the reason for waiting
        if CLIENTS in serving.client.stats().holders:
            return [
                "paused by a client: POST /resume, or Resume on the dashboard, continues",
                serving.memory_health(),
                started.memory.health(),
            ]
        companions = started.parts.trainer.companions.values()
        return [
            *started.sources.health(),
            started.parts.buffer.health(),
            *(companion.health() for companion in companions),
            serving.memory_health(),
            started.memory.health(),
        ]

    readable = without_template(tokenizer, started.config.model.chat_template_kwargs)
    # a file's readers are not known
    pages = serving.page_urls(with_key=prepared.console.is_terminal)
    display = TrainingDisplay(prepared.console, sources=health, readable=readable, pages=pages)
    prepared.closing.callback(display.stop)
    display.subscribe(prepared.events)


def _subscribe_samples(started: StartedRun, tokenizer: Tokenizer) -> None:
    events, hide = started.prepared.events, started.prepared.run_log.redactor.text
    sample_log = SampleLog(
        started.opened.path / SAMPLES_FILE,
        lambda parts: [hide(text) for text in tokenizer.decode_parts(parts)],
        every=started.config.logging.sample_every,
        step=started.first_step,
    )

    def write(event: StepFinished) -> None:
        if samples := sample_log.write(event.batch.step, event.batch.groups):
            events.emit(SamplesWritten(event.batch.step, samples))

    events.subscribe(StepFinished, write)


def _subscribe_trackers(started: StartedRun) -> None:
    tracking, redactor = started.config.logging, started.prepared.run_log.redactor
    run = TrackedRun(
        started.opened.path,
        tracking.project,
        redactor.value(started.config.redacted()),
        step=started.first_step,
    )
    trackers = Trackers(tracking.trackers, run)
    started.prepared.closing.callback(trackers.close)
    trackers.subscribe(started.prepared.events)
