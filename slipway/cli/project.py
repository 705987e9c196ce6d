"""The command `slipway init`, which creates a project."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from slipway.cli.command import say
from slipway.kinds.inputs import ENCODER
from slipway.project.creation import create, require_new_project
from slipway.project.inspection import inspect
from slipway.project.pretrained import (
    WeightSearch,
    find_encoder,
    find_weights,
    local_weights,
)
from slipway.project.proposal import DECIMALS, propose, wrapped
from slipway.project.recipe import are_photographs
from slipway.project.task_choice import Question
from slipway.system.environment import activation


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    help="A folder of class folders, a table or an archive; it is only read.",
)
@click.option(
    "--task", metavar="TASK", help="The task, such as table_regression, if the data is unclear."
)
@click.option("--target", metavar="COLUMN", help="The column to predict, if several could be.")
@click.option(
    "--split-by",
    metavar="COLUMN",
    help="The column of a panel by which its rows are split, such as Country or Year, or none.",
)
@click.option(
    "--decimal",
    type=click.Choice([*DECIMALS]),
    help="The decimal mark, if numbers such as 1,234 may mean two things.",
)
@click.option(
    "--network", metavar="NAME", help="The network, such as lightgbm; by default a proposed one."
)
@click.option("--sheet", metavar="NAME", help="The sheet of a workbook; by default the first.")
@click.option("--yes", is_flag=True, help="Write the project without asking about proposals.")
def init(
    folder: Path,
    data: Path,
    task: str | None,
    target: str | None,
    split_by: str | None,
    decimal: str | None,
    network: str | None,
    sheet: str | None,
    yes: bool,
) -> None:
    """Look at the data, propose every setting with its reason, and write a project.

    FOLDER is created if it is missing; by default it is the working directory. An existing project
    is never overwritten. If the task, the target or its decimal mark is unclear, --yes is not
    enough: give --task, --target or --decimal.
    """
    require_new_project(folder)
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    say(f"looking at {data} ...")
    summary = inspect(data, sheet)
    search = WeightSearch(None if network is None else local_weights(folder, network))
    if network == ENCODER:
        search = find_encoder(folder)
    elif search.weights is None and summary.images and are_photographs(summary.images):
        search = find_weights(folder)
    fixed: dict[str, Any] = {"network": network, "search": search}
    proposal = propose(summary, task, target, split_by=split_by, decimal=decimal, **fixed)
    while proposal.questions and is_asked:
        answers = _ask(proposal.questions[0])
        task, target = answers.get("--task", task), answers.get("--target", target)
        decimal = answers.get("--decimal", decimal)
        proposal = propose(summary, task, target, split_by=split_by, decimal=decimal, **fixed)
    if proposal.panel is not None and is_asked and split_by is None and not yes:
        split_by = _ask(proposal.panel)["--split-by"]
        proposal = propose(summary, task, target, split_by=split_by, decimal=decimal, **fixed)
    if not proposal.questions:
        say(proposal.text())
        if is_asked and not yes:
            click.confirm(f"\nWrite the project to {folder}?", default=True, abort=True)
    written = create(folder, proposal)
    go = f"{command}\n  " if (command := activation()) else ""  # this shell lacks `slipway`
    go += "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}\n  "
    say(f"\nwritten to {folder}: {', '.join(written)}\nnow:")
    say(f"  {go}slipway run    # make the model\n  slipway serve  # start the service")
    for words in proposal.last_words:
        say("\n" + "\n".join(wrapped(f"but first: {words}", 2)))


def _ask(question: Question) -> dict[str, str]:
    choice = click.Choice(question.candidates)
    answer: str = click.prompt(question.text, type=choice, default=question.candidates[0])
    return {question.option: answer}
