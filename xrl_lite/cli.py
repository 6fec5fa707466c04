"""The command line: `xrl-lite train | eval | score | view | replay | serve | build-model | doctor`."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import anyio
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

import xrl_lite
from xrl_lite.errors import ConfigError, XrlLiteError
from xrl_lite.registry import make_importable
from xrl_lite.settings import explain

if TYPE_CHECKING:
    from xrl_lite.config import RunConfig
    from xrl_lite.gateway import Gateway
    from xrl_lite.judger.score import Tallies

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_BELOW, EXIT_STOPPED = 0, 1, 2, 3, 130

_ERRORS_SHOWN = 5

AddCommand = Callable[..., argparse.ArgumentParser]
"""Adds a command, and returns the parser of its arguments."""

GATEWAY_KEY_VARIABLE = "XRL_LITE_GATEWAY_KEY"
"""Environment variable with the key of whoever makes sessions."""

# Threads that wait should sleep: spinning ones of one process make another's computation up to 19 times slower. The
# variable is read when torch is first loaded, in this process and in every child.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0; 1 for an error; 2 for a wrong config; 3 where `score` misses its threshold; 130 when stopped.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse ends a list of words at the first option; words behind it are overrides as well
    if any(word.startswith("-") or not hasattr(options, "overrides") for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    if isinstance(stdout := cast("object", sys.stdout), io.TextIOWrapper):
        stdout.reconfigure(errors="backslashreplace")  # a completion may hold what no terminal can show
    try:
        make_importable(Path.cwd())  # an installed script has its own folder on the path, not the user's
        return options.command(options)
    except ConfigError as error:
        _complain(error)
        return EXIT_USAGE
    except (XrlLiteError, OSError) as error:
        _complain(error)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_STOPPED


def _train(options: argparse.Namespace) -> int:
    from xrl_lite.config import load_config

    config = load_config(options.config, options.overrides)
    if options.dry_run:
        return _dry_run(config)
    from xrl_lite import run

    summary = run.run_until_done(partial(run.train, config))
    if summary is None:
        return EXIT_STOPPED
    if summary.stopped:
        changes = [change for change in options.overrides if not change.startswith(("name=", "checkpoint.resume="))]
        again = shlex.join([str(options.config), *changes, f"name={summary.folder.name}", "checkpoint.resume=auto"])
        _say(f"Stopped after step {summary.last_step}, saved in {summary.checkpoint}. Go on with:")
        _say(f"  xrl-lite train {again}")
        return EXIT_STOPPED
    return EXIT_OK


def _dry_run(config: RunConfig) -> int:
    from xrl_lite.config import check, dump_config

    data = check.check_data(config)
    check.check_model(config)
    actors = list(check.planned_actors(config, data.judger_configs))
    table = Table("actor", "CPU slots", "threads", title="what the run would start", title_justify="left")
    for actor in actors:
        table.add_row(actor.name, f"{actor.num_cpus:g}", str(actor.num_threads or "all"))
    table.add_section()
    table.add_row("together", f"{sum(actor.num_cpus for actor in actors):g} of {check.available_cpus(config):g}", "")
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(dump_config(config).rstrip()))
    console.print(table)
    _say(f"{len(data.train)} rows to train on, {len(data.evaluation)} held out; {check.describe_model(config)}")
    check.check_resources(config, data.judger_configs)
    check.check_devices(config)
    return EXIT_OK


def _eval(options: argparse.Namespace) -> int:
    from xrl_lite import run
    from xrl_lite.config import load_config

    given = {
        name: Path(item.removeprefix(f"{name}="))
        for name in ("checkpoint", "record")
        for item in options.overrides
        if item.startswith(f"{name}=")
    }
    overrides = [item for item in options.overrides if not item.startswith(("checkpoint=", "record="))]
    config = load_config(options.config, overrides)
    metrics = run.run_until_done(partial(run.evaluate, config, given.get("checkpoint"), record=given.get("record")))
    table = Table("metric", "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    Console(highlight=False).print(table)
    return EXIT_OK


def _serve(options: argparse.Namespace) -> int:
    from xrl_lite import run
    from xrl_lite.config.serve_config import load_serve_config

    config = load_serve_config(options.model, options.overrides)
    api_key = os.environ.get(GATEWAY_KEY_VARIABLE)

    def on_ready(gateway: Gateway) -> None:
        _say(f"{config.gateway.model_name!r} is served; Ctrl-C ends it.")
        _say(f"  OPENAI_BASE_URL={gateway.url}/v1 ANTHROPIC_BASE_URL={gateway.url}")
        shown = f"the one of {GATEWAY_KEY_VARIABLE}" if api_key else gateway.api_key
        _say(f"  key: {shown}")
        _say(f"  POST {gateway.url}/sessions makes a session, .../finalize returns its trajectories.")

    run.run_until_done(partial(run.serve, config, api_key=api_key, on_ready=on_ready))
    return EXIT_OK


def _replay(options: argparse.Namespace) -> int:
    from xrl_lite import run
    from xrl_lite.config import load_config
    from xrl_lite.trainer.run_folder import EVENTS

    events: Path = options.run / EVENTS if options.run.is_dir() else options.run
    if not events.is_file():
        raise ConfigError(f"There is no {events}: give the folder of a run, or its {EVENTS}.")
    config = load_config(options.config or events.with_name("config.yaml"), options.overrides)
    with ExitStack() as stack:
        output = options.output or Path(stack.enter_context(TemporaryDirectory()))
        num_events = run.replay(config, events, output=output, break_at=options.break_at)
    _say(f"{num_events} events of {events} happened again, in the same order.")
    return EXIT_OK


def _score(options: argparse.Namespace) -> int:
    from xrl_lite.config import change_judger, load_judger
    from xrl_lite.data import DataConfig
    from xrl_lite.judger import score
    from xrl_lite.judger.data_sources import judger_for

    given: dict[str, Any] = {"path": options.data, "data_source": options.data_source, "num_rows": options.num_rows}
    columns = {"ground_truth": options.label_column, "prompt": options.prompt_column}
    given["columns"] = {part: column for part, column in columns.items() if column is not None}
    try:
        data = DataConfig.model_validate(given)
    except ValidationError as error:
        raise explain(error, DataConfig, where=str(options.data)) from error
    samples = score.read_samples(data, response_column=options.response_column)
    if options.judger is None:
        config = change_judger(judger_for(sample.row.data_source for sample in samples), options.overrides)
    else:
        config = load_judger(options.judger, options.overrides)
    output = options.output or options.data.with_suffix(".scored.jsonl")
    tallies = score.Tallies()
    done = score.open_output(output, samples, config, resume=options.resume)
    for record in done:
        tallies.add(record)
    run = partial(
        score.score_file,
        config,
        samples,
        output,
        start=len(done),
        at_once=options.at_once,
        num_cpus=options.num_cpus,
        is_self_tested=not options.no_self_test,
    )
    try:
        _run_with_progress(run, tallies, total=len(samples))
    except KeyboardInterrupt:
        _say(f"Stopped after {tallies.together.total} of {len(samples)} samples. Go on with --resume.")
        return EXIT_STOPPED
    _show_tallies(tallies)
    _say(f"{len(samples)} rewards in {output}")
    return _verdict(tallies, options)


def _run_with_progress(run: Callable[..., Awaitable[None]], tallies: Tallies, *, total: int) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = [TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[mean]}")]
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("scoring", total=total, completed=tallies.together.total, mean="")

        def on_record(record: dict[str, Any]) -> None:
            tallies.add(record)
            progress.update(task, advance=1, mean=f"mean {tallies.together.mean_score:.3f}")

        def on_note(text: str) -> None:
            progress.console.print(Text(text))

        anyio.run(partial(run, on_record=on_record, on_note=on_note), backend_options={"use_uvloop": True})


def _show_tallies(tallies: Tallies) -> None:
    from xrl_lite.judger import Outcome

    counted = tallies.together.outcomes
    names = [outcome.value for outcome in Outcome if outcome is Outcome.OK or counted[outcome.value]]
    table = Table("judger", "data source", "samples", *names, "mean score", "p50 (ms)", "p99 (ms)")
    for (judger, source), tally in tallies.by_source.items():
        counts = [str(tally.outcomes[name]) for name in names]
        times = [f"{tally.run_quantile_s(share) * 1e3:.1f}" for share in (0.5, 0.99)]
        table.add_row(judger, source, str(tally.total), *counts, f"{tally.mean_score:.4f}", *times)
    Console(highlight=False).print(table)


def _verdict(tallies: Tallies, options: argparse.Namespace) -> int:
    together = tallies.together
    max_failed = 0 if options.max_failed is None and options.threshold is not None else options.max_failed
    for error in islice(together.first_errors.values(), _ERRORS_SHOWN):
        _say(f"The first of its kind: {error}")
    if not together.scores:
        _say("No sample got a score.")
        return EXIT_ERROR
    if options.threshold is not None and not together.mean_score >= options.threshold:
        _say(f"The mean score {together.mean_score:.4f} is below the threshold {options.threshold:g}.")
        return EXIT_BELOW
    if max_failed is not None and together.num_failed > max_failed:
        _say(f"{together.num_failed} of {together.total} samples failed, and at most {max_failed} may (--max-failed).")
        return EXIT_BELOW
    return EXIT_OK


def _build_model(options: argparse.Namespace) -> int:
    from xrl_lite import run
    from xrl_lite.config import load_config

    config = load_config(options.config, options.overrides)
    if config.model.build is None:
        raise ConfigError(f"{options.config} has no model.build, so there is no model to build.")
    _say(str(run.run_until_done(partial(run.build_model, config))))
    return EXIT_OK


def _view(options: argparse.Namespace) -> int:
    from xrl_lite import view

    console = Console(highlight=False, soft_wrap=options.group is None and options.step is None)
    if options.step is None and options.group is None:
        shown = view.overview(options.run, width=min(console.width, 100))
    else:
        shown = view.attempts(
            options.run, step=options.step, group=options.group, order=options.order, num_shown=options.num_shown
        )
    for part in shown:
        console.print(part)
    return EXIT_OK


def _doctor(options: argparse.Namespace) -> int:
    from xrl_lite import doctor

    table = Table("what", "version", title="for a bug report", title_justify="left")
    for name, found in doctor.versions():
        table.add_row(name, found)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    styles = {doctor.Verdict.OK: "green", doctor.Verdict.NOTE: "yellow", doctor.Verdict.PROBLEM: "red"}
    num_problems = 0
    for finding in doctor.examine(options.output_dir):
        num_problems += finding.verdict is doctor.Verdict.PROBLEM
        verdict = (f"{finding.verdict:8}", styles[finding.verdict])
        advice = f"\n{'':9}{finding.advice}" if finding.advice else ""
        console.print(Text.assemble(verdict, f" {finding.what}: {finding.text}{advice}"))
    return EXIT_ERROR if num_problems else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xrl-lite", description=(xrl_lite.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"xrl-lite {xrl_lite.__version__}")
    add_command = parser.add_subparsers(required=True, metavar="COMMAND").add_parser
    train = _config_command(add_command, "train", "train a policy", _train)
    train.add_argument(
        "--dry-run", action="store_true", help="check everything and show the resolved settings, but start nothing"
    )
    _config_command(
        add_command,
        "eval",
        "held-out accuracy of the starting model, or of a checkpoint or model folder given as checkpoint=PATH; with "
        "record=FILE it goes on where it was stopped",
        _eval,
    )
    _serve_command(add_command)
    _config_command(
        add_command, "build-model", "build and warm up the model of a config, if it is not cached", _build_model
    )
    _replay_command(add_command)
    _score_command(add_command)
    _view_command(add_command)
    doctor = add_command(
        "doctor",
        help="versions for a bug report, and whether this machine and installation can do what a run needs",
        description="Show versions for a bug report, and try what a run needs: processes, shared memory, sandbox, "
        "libraries. Exit code 1 if something is a problem.",
    )
    doctor.add_argument("--output-dir", type=Path, default=Path("runs"), help="folder of the runs (runs)")
    doctor.set_defaults(command=_doctor)
    return parser


def _replay_command(add_command: AddCommand) -> None:
    parser = add_command(
        "replay",
        help="repeat the order of events of a recorded run, without model and processes",
        description="Repeat the order of events of a recorded run, without model and processes. What came from outside "
        "is taken from the record, what the run decided is decided again; the first difference is an error.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run, or its events.jsonl")
    add("overrides", nargs="*", metavar="a.b=c", help="settings to change")
    add("--config", type=Path, help="settings of the run; config.yaml beside the events if not given")
    add("--output", type=Path, help="folder for the metrics of the replay")
    add("--break-at", type=int, metavar="N", help="enter the debugger before event N")
    parser.set_defaults(command=_replay)


def _view_command(add_command: AddCommand) -> None:
    parser = add_command(
        "view",
        help="show what a run did, also while it goes on: steps, evaluations, what was dropped, single attempts",
        description="Show what a run did, also while it goes on. Without options: its steps, evaluations, and what "
        "became of its groups. With --step or --group: the attempts that were trained on.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of the run")
    add("--step", type=int, metavar="N", help="attempts of this step; a negative number counts from the last one")
    add("--group", metavar="G", help="attempts at this prompt, in full: number of the group, or its uid")
    add("--order", choices=("drawn", "best", "worst", "longest"), default="drawn", help="which attempts come first")
    add("--num-shown", type=int, default=16, metavar="N", help="show so many attempts (16)")
    parser.set_defaults(command=_view)


def _score_command(add_command: AddCommand) -> None:
    parser = add_command(
        "score",
        help="judge the responses in a file, without any model",
        description="Judge the responses in a JSONL or parquet file, without any model. Exit code 3: a threshold is "
        "missed.",
    )
    add = parser.add_argument
    add("data", type=Path, metavar="DATA", help="rows with response and ground truth; rollouts/step_*.jsonl will do")
    add("overrides", nargs="*", metavar="a.b=c", help="settings of the judger to change")
    add("--judger", help="a .yaml file (of a judger or of a run), a kind such as gsm8k, or reward code as file.py:name")
    add("--output", type=Path, help="where rewards go; DATA with the ending .scored.jsonl if not given")
    add("--resume", action="store_true", help="go on with an output that is there")
    add("--response-column", help="column of the response, a text or a list of them")
    add("--label-column", help="column of the ground truth")
    add("--prompt-column", help="column of the prompt, a text or messages; for judgers that read it")
    add("--data-source", help="data source of rows that name none")
    add("--num-rows", type=int, help="use so many rows from the start")
    add("--threshold", type=float, help="exit code 3 if the mean score is lower, or a sample fails")
    add("--max-failed", type=int, help="exit code 3 if more samples fail (0 with --threshold)")
    add("--at-once", type=int, default=256, help="most judgements under way (256)")
    add("--num-cpus", type=float, help="CPU slots for workers; all of the machine if not given")
    add("--no-self-test", action="store_true", help="do not let the judger prove itself first")
    parser.set_defaults(command=_score)


def _serve_command(add_command: AddCommand) -> None:
    parser = add_command(
        "serve",
        help="serve a model to agents, with the APIs of OpenAI and Anthropic",
        description="Serve a model to agents, with the APIs of OpenAI and Anthropic. The key of whoever makes sessions "
        f"is taken from {GATEWAY_KEY_VARIABLE}, or made up and shown.",
        formatter_class=partial(_SettingsHelp, settings="xrl_lite.config.serve_config:ServeConfig"),
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a model, or a .yaml file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings to change; the list is below")
    parser.set_defaults(command=_serve)


def _config_command(add_command: AddCommand, name: str, text: str, function: object) -> argparse.ArgumentParser:
    parser = add_command(name, help=text, description=f"{text[0].upper()}{text[1:]}.", formatter_class=_SettingsHelp)
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="a .yaml file, or a .py file with config = RunConfig(...)"
    )
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings to change; the list is below")
    parser.set_defaults(command=function)
    return parser


class _SettingsHelp(argparse.HelpFormatter):
    """Adds the settings below the arguments, made from the schema when somebody asks for help."""

    def __init__(self, *args: Any, settings: str = "xrl_lite.config:RunConfig", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = settings

    def format_help(self) -> str:
        from xrl_lite.config.describe import describe
        from xrl_lite.registry import load_object

        lines = [super().format_help(), "settings:"]
        for setting in describe(load_object(self._settings)):
            lines.append(f"  {setting.key}  ({setting.kind}, default {setting.default})")
            lines.append(f"      {setting.description}")
        return "\n".join(lines) + "\n"


def _complain(error: Exception) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(f"{type(error).__name__}: {error}", style="red"))
    if not isinstance(error, ConfigError):  # for those the message is all there is to say
        for note in getattr(error, "__notes__", ()):
            console.print(Text(note))


def _say(text: str) -> None:
    Console(highlight=False, soft_wrap=True).print(Text(text))


if __name__ == "__main__":
    sys.exit(main())
