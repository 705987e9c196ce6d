"""`slipway run`, `compare`, `take`, `show` and `reset`."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import click

from slipway.cli.command import is_quiet
from slipway.cli.verbs import VERBS
from slipway.system import files
from slipway.system.errors import ParamsError

SERVICE_HOST = os.environ.get("BENTOML_HOST") or "127.0.0.1"


@click.command()
@click.argument("words", nargs=-1, metavar="[STAGE] [KEY=VALUE ...]")
@click.option("--name", help="Name of the experiment; by default run-NUMBER.")
@click.option("--serve", is_flag=True, help="Start the service once the model may be served.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=3000,
    envvar="BENTOML_PORT",
    help="Port of the service; 3000.",
)
def run(words: tuple[str, ...], name: str | None, serve: bool, port: int) -> None:
    """Run the stages whose inputs changed, up to STAGE or all, and record the experiment.

    The project is checked first, as by `slipway check`. KEY=VALUE changes params.yaml permanently.
    After an interrupt, the same command resumes the run.
    """
    from slipway.experiments.run import ExperimentRequest, conclude
    from slipway.experiments.run import run as run_pipeline

    request = ExperimentRequest(words, name, is_quiet())
    if serve and request.stages:
        raise ParamsError(
            f"--serve was given with the stage {request.stages[0]}, expected all stages: only they "
            "end with a certificate. Leave the stage out, or --serve."
        )
    if serve:
        from slipway.serving.process.addresses import require_free

        require_free(SERVICE_HOST, port, "Choose another with --port")  # before the long run
    conclude(run_pipeline(request), is_quiet=is_quiet())
    if serve:
        service = VERBS["serve"].command("serve")
        click.get_current_context().invoke(service, host=SERVICE_HOST, port=port)


@click.command()
@click.argument("names", nargs=-1, metavar="[A B]")
@click.option("--sort", metavar="KEY", help="A column or key; `metric` has the best first.")
@click.option("--reverse", is_flag=True, help="Reverse the order of the rows.")
@click.option(
    "--filter", "conditions", multiple=True, metavar="CONDITION", help="Such as 'train.epochs>5'."
)
@click.option("--html", type=click.Path(path_type=Path), help="Write a page to this file.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--price-per-gpu-hour",
    "gpu_hour",
    type=click.FloatRange(min=0),
    metavar="PRICE",
    help="Add a column with the cost of each run.",
)
def compare(
    names: tuple[str, ...],
    sort: str | None,
    reverse: bool,
    conditions: tuple[str, ...],
    html: Path | None,
    as_csv: bool,
    as_json: bool,
    gpu_hour: float | None,
) -> None:
    """List the experiments, newest first, with the params that differ and the results.

    With A and B, show these two side by side.
    """
    from slipway.experiments.comparison import read_comparison

    if names:
        if sort or reverse or conditions or as_csv or as_json or gpu_hour is not None:
            raise ParamsError(
                "compare was given names and an option for lists; expected no option but --html "
                "with names. Leave out --sort, --reverse, --filter, --csv, --json and "
                "--price-per-gpu-hour, or the names."
            )
        _compare_two(names, html)
        return
    comparison = read_comparison(gpu_hour).filtered(conditions)
    if sort or reverse:
        comparison = comparison.sorted(sort or "started", reverse=reverse)
    if html:
        from slipway.experiments.page import comparison_page

        files.write_text(html, comparison_page(comparison))
        click.echo(f"wrote {html}", err=as_csv or as_json)
    if as_json:
        click.echo(json.dumps(comparison.entries(), indent=2))
    elif as_csv:
        click.echo(comparison.csv(), nl=False)
    elif not html:
        click.echo(comparison.text(shutil.get_terminal_size((100, 24)).columns))


def _compare_two(names: tuple[str, ...], html: Path | None) -> None:
    from slipway.experiments.comparison import read_comparison
    from slipway.experiments.pair import read_pair

    pair = read_pair(read_comparison(), names)
    if html:
        from slipway.experiments.pair_page import pair_page

        files.write_text(html, pair_page(pair))
        click.echo(f"wrote {html}")
    else:
        click.echo(pair.text())


@click.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Give up edits that no commit and no experiment holds.")
def take(name: str, yes: bool) -> None:
    """Make an experiment the workspace: its params, code, metrics and outputs.

    A trial of a search ended after its training, so the later stages run now, on the test rows.
    """
    from slipway.experiments.run import ExperimentRequest, conclude
    from slipway.experiments.run import run as run_pipeline
    from slipway.experiments.workspace import opened_before
    from slipway.experiments.workspace import take as take_experiment

    record = take_experiment(name, accept_loss=yes)
    if record is not None and record.search:
        click.echo(f"the workspace is {name}: params.yaml and the model; the other stages run now")
        if others := opened_before(record):
            click.echo(
                f"warning: the test rows were opened for {', '.join(others)} of {record.search}. "
                "The best of several trials on the test rows looks better than it is: decide by "
                "the validation rows, or report the score on new rows.",
                err=True,
            )
        conclude(run_pipeline(ExperimentRequest()))
        return
    click.echo(f"the workspace is {name}: params.yaml, metrics and outputs. Next: slipway serve")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def reset(yes: bool) -> None:
    """Remove the outputs of all stages; keep data, params, code and experiments."""
    from slipway.experiments.workspace import removable
    from slipway.experiments.workspace import reset as remove

    paths = removable()
    if not paths:
        click.echo("there is no output to remove")
        return
    shown = ", ".join(map(str, paths))
    if not yes and not sys.stdin.isatty():
        raise ParamsError(
            f"reset would remove {shown}; expected a terminal to ask on. Add --yes to agree."
        )
    if not yes:
        click.confirm(f"remove {shown}?", abort=True)
    remove(paths)
    click.echo(f"removed {shown}. Experiments stay: `slipway take NAME` brings one back")


def _refuse_names(names: tuple[str, ...]) -> None:
    """Refuse the names of experiments, because only the workspace has reports."""
    from slipway.experiments.comparison import read_comparison

    known = [record.name for record in read_comparison().every]
    listed = f"the experiments are {', '.join(known)}" if known else "there is no experiment yet"
    taken = next((name for name in names if name in known), "NAME")
    raise click.UsageError(
        f"show was given {' '.join(names)}, expected no name: it opens the reports of the "
        f"workspace; {listed}. `slipway compare` shows their results, and `slipway take {taken}` "
        "makes one the workspace."
    )


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="a free one",
    help="Port to serve on.",
)
@click.option("--serve", is_flag=True, help="Serve the page even if a browser can be opened.")
@click.argument("names", nargs=-1, metavar="")
def show(port: int, serve: bool, names: tuple[str, ...]) -> None:
    """Open the page of all reports; without a display, serve it on 127.0.0.1."""
    if names:
        _refuse_names(names)
    from slipway.experiments.display import open_page, page_server, write_index

    page = write_index()
    if not serve and open_page(page):
        click.echo(f"opened {page}")
        return
    with page_server(port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        click.echo(f"{page} is served at {address} until Ctrl-C")
        if os.environ.get("SSH_CONNECTION"):
            there = f"{server.server_address[1]}:127.0.0.1:{server.server_address[1]}"
            click.echo(f"from your own machine, first: ssh -N -L {there} HOST")
        with contextlib.suppress(KeyboardInterrupt):  # as it says
            server.serve_forever()
