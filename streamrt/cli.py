"""The command line: `streamrt up | down | ps | logs | check | fetch | talk | doctor`.

Says what happened and what to do about it; decides nothing that a library caller could not. Exit codes: 0 done, 1 it failed,
2 the command, the file or the machine is wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop

from streamrt.errors import BadRequest, ConfigError, NotRunning, StreamrtError
from streamrt.log import configure
from streamrt.rundir import RunDir, list_runs, log_dir

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__.partition("\n")[0])

PipelineFile = Annotated[Path, typer.Argument(help="a pipeline.toml", show_default=False)]
PipelineOrFolder = Annotated[Path, typer.Argument(help="a pipeline.toml, or a folder with a checkpoint", show_default=False)]
RunName = Annotated[str | None, typer.Argument(help="the run's name; may be left out when only one is up", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="override a key: --set stage.llm.args.max_tokens=200", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def main() -> None:
    """Run the command line; errors that have a name become one clear message."""
    try:
        app()
    except StreamrtError as error:
        _fail(error)


@app.command()
def up(
    pipeline: PipelineOrFolder,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option(help="another name for this run than the file's pipeline.name")] = "",
    detach: Annotated[bool, typer.Option("--detach", "-d", help="return when the pipeline is ready")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan and start nothing")] = False,
    as_file: Annotated[bool, typer.Option("--print", help="print the pipeline file that this would run, and start nothing")] = False,
    fetch: Annotated[bool, typer.Option("--fetch", help="download weights that are missing")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="allow a gateway beyond loopback without a key")] = False,
    no_gateway: Annotated[bool, typer.Option("--no-gateway", help="start the stages only")] = False,
    trace: Annotated[Path | None, typer.Option(help="write a trace of every request to this file (for Perfetto)")] = None,
    as_json: AsJson = False,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Start a pipeline: one process per stage replica, and the gateway."""
    from streamrt.checkpoint import open_source
    from streamrt.config import to_toml
    from streamrt.plan import Machine, make_plan
    from streamrt.registry import load_graph

    chosen = list(overrides or [])
    if name:
        chosen.append(f'pipeline.name="{name}"')
    if insecure:
        chosen.append("gateway.insecure=true")
    if no_gateway:
        chosen.append("gateway.replicas=0")
    try:
        source = open_source(pipeline, chosen)
        config = source.config
        graph, classes = load_graph(config)
        if as_file:
            typer.echo(to_toml(config), nl=False)
            return
        plan = make_plan(config, graph, classes, Machine.here())
        if dry_run:
            typer.echo(plan.as_json() if as_json else plan.as_text())
            return
        _need_weights(config, classes, fetch)
    except StreamrtError as error:
        _report(ready_fd, str(error))
        raise
    if ready_fd < 0:
        for line in source.found:
            typer.echo(line)
    if detach:
        _detach(config.name)
        return
    from streamrt.orchestrator import Orchestrator
    from streamrt.show import make_display

    configure("orchestrator", os.environ.get("STREAMRT_LOG", "WARNING"))
    display = make_display(config, quiet=ready_fd >= 0)
    orchestrator = Orchestrator(
        config, graph, plan, trace=trace, on_change=display.change, on_ready=lambda addresses: _ready(display, ready_fd, addresses)
    )
    try:
        with display:
            status = uvloop.run(orchestrator.run())
    except StreamrtError as error:
        _report(ready_fd, str(error))
        raise
    if orchestrator.failure is not None:
        _report(ready_fd, str(orchestrator.failure))
        _fail(orchestrator.failure)
    raise typer.Exit(status)


@app.command()
def down(name: RunName = None, within: Annotated[float, typer.Option(help="seconds before what still runs is killed")] = 20.0) -> None:
    """Drain and stop a run."""
    run = RunDir.find(name)
    assert run.facts is not None
    try:
        handle = os.pidfd_open(run.facts.pid)
        os.kill(run.facts.pid, signal.SIGTERM)
    except ProcessLookupError:
        typer.echo(f"{run.name} has ended already")
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        # A second SIGTERM ends it without draining; the kernel ends the stages with it.
        if select.select([handle], [], [], within)[0]:
            typer.echo(f"{run.name} is down")
            return
        signal.pidfd_send_signal(handle, number)
        within = 5.0
    typer.echo(f"{run.name} had to be killed")


@app.command()
def ps(as_json: AsJson = False) -> None:
    """Show the runs that are up, with their processes."""
    rows = uvloop.run(_tables())
    if as_json:
        typer.echo(json.dumps(rows))
        return
    if not rows:
        typer.echo("nothing is up")
        return
    from streamrt.show import print_runs

    print_runs(rows)


@app.command()
def logs(
    name: RunName = None,
    process: Annotated[str, typer.Option(help="one process only, such as llm-0 or gateway-0")] = "*",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with what is written from now on")] = False,
    lines: Annotated[int, typer.Option("-n", help="how many lines of each file to begin with")] = 50,
) -> None:
    """Print what the processes of a run have logged; of the last run of that name when none is up."""
    folder = log_dir(name) if name else RunDir.find(None).logs
    files = sorted(str(path) for path in folder.glob(f"{process}.log"))
    if not files:
        raise NotRunning(f"{folder}: no logs of {process}", hint="streamrt ps shows what is up")
    sys.stdout.flush()
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), *files])


@app.command()
def check(pipeline: PipelineOrFolder, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Say what a pipeline file means: stages, edges, tasks, endpoints, memory; of a checkpoint also what it is. Starts nothing; needs no torch."""
    from streamrt.check import check as check_pipeline
    from streamrt.checkpoint import open_source

    source = open_source(pipeline, overrides or [])
    report = check_pipeline(source.config, found=source.found)
    typer.echo(report.as_json() if as_json else report.as_text())


@app.command()
def fetch(pipeline: PipelineFile, overrides: Overrides = None) -> None:
    """Download, check and convert the weights that a pipeline uses. The only command that downloads."""
    from streamrt.config import load_pipeline
    from streamrt.registry import load_graph
    from streamrt.show import fetch_with_progress
    from streamrt.weights import sources_of

    config = load_pipeline(pipeline, overrides or [])
    _, classes = load_graph(config)
    fetch_with_progress(sources_of((classes[stage.name], stage.args) for stage in config.stages), config.folder)


@app.command()
def talk(
    wav: Annotated[Path, typer.Argument(help="what the user says: a mono or stereo WAV file", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="write the spoken reply to this WAV file")] = None,
    run_name: Annotated[
        str | None, typer.Option("--run", help="which run; may be left out when only one is up", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say a WAV file to a voice pipeline that is up; print the transcript, the reply and where the time went."""
    from streamrt.client import Client
    from streamrt.talk import talk as talk_to

    if not wav.is_file():
        raise BadRequest(f"{wav}: no such file")

    async def run() -> Any:
        client = await Client.connect(RunDir.find(run_name))
        try:
            return await talk_to(client, wav, out)
        finally:
            await client.close()

    report = uvloop.run(run())
    typer.echo(report.as_json() if as_json else report.as_text())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Look at this machine: what is there, what is missing, and how to get it."""
    from streamrt.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([{"name": f.name, "ok": f.is_ok, "found": f.found, "hint": f.hint} for f in findings]))
    else:
        for f in findings:
            typer.echo(f"{'ok ' if f.is_ok else 'no '} {f.name}: {f.found}" + (f"\n    hint: {f.hint}" if f.hint else ""))
    if not all(f.is_ok or f.is_optional for f in findings):
        raise typer.Exit(2)


def _need_weights(config: Any, classes: Any, fetch: bool) -> None:
    """Every model file is there, or the user is told how to get it, before anything is started."""
    from streamrt.weights import resolve, sources_of

    sources = sources_of((classes[stage.name], stage.args) for stage in config.stages)
    if fetch:
        from streamrt.show import fetch_with_progress

        fetch_with_progress(sources, config.folder)
    for source in sources:
        resolve(source, config.folder, fetch_line=f"streamrt fetch {config.file}")


def _detach(name: str) -> None:
    """Start the same command again in a session of its own, and wait until it says that it is ready."""
    read_fd, write_fd = os.pipe()
    command = [
        sys.executable,
        "-m",
        "streamrt",
        *(word for word in sys.argv[1:] if word not in ("-d", "--detach")),
        "--ready-fd",
        str(write_fd),
    ]
    folder = log_dir(name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "orchestrator.log").open("wb") as log:
        subprocess.Popen(command, pass_fds=(write_fd,), start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        report = file.read()
    if report != "ready":
        typer.echo(report.strip() or f"it ended before it was ready; see {folder}", err=True)
        raise typer.Exit(1)
    facts = RunDir.find(name).facts
    assert facts is not None
    typer.echo(f"{name} is ready (pid {facts.pid})" + "".join(f"\n  {address}" for address in facts.gateways))


def _ready(display: Any, ready_fd: int, addresses: list[str]) -> None:
    display.ready(addresses)
    _report(ready_fd, "ready")


def _report(fd: int, text: str) -> None:
    """Tell whoever started us, once."""
    if fd >= 0:
        try:
            os.write(fd, text.encode())
            os.close(fd)
        except OSError:
            pass  # told already, or nobody waits any more


async def _tables() -> list[dict[str, Any]]:
    import msgspec

    from streamrt.member import Member

    rows = []
    for run in list_runs():
        assert run.facts is not None
        row: dict[str, Any] = {
            "name": run.name,
            "pid": run.facts.pid,
            "gateways": run.facts.gateways,
            "pipeline": run.facts.pipeline_path,
            "replicas": [],
        }
        member = Member(run, f"ps-{os.getpid()}")
        try:
            async with asyncio.timeout(5):
                await member.join("client")
                await member.has_table()
            row["replicas"] = msgspec.to_builtins(member.table.replicas)
        except (StreamrtError, TimeoutError) as error:
            row["error"] = str(error) or "does not answer"
        finally:
            await member.close()
        rows.append(row)
    return rows


def _fail(error: StreamrtError) -> NoReturn:
    typer.echo(f"streamrt: {error}", err=True)
    sys.exit(2 if isinstance(error, ConfigError | BadRequest) else 1)
