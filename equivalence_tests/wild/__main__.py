"""``python -m equivalence_tests.wild``: what the checker says about every attention of three libraries."""

import functools
import importlib.metadata
import json
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.wild.broken import mutant_summary, mutant_table, rows_of_mutants
from equivalence_tests.wild.checking import Attention, judged_attentions
from equivalence_tests.wild.children import Limits, in_children
from equivalence_tests.wild.models import WildModel
from equivalence_tests.wild.table import summary, table, written
from equivalence_tests.wild.torchvision_stand_in import make_importable

LIBRARIES = ("transformers", "timm", "diffusers")
Found = list[dict[str, Any]]
Work = Callable[[WildModel], Iterator[dict[str, Any]]]

app = typer.Typer(add_completion=False, no_args_is_help=True)


def listed_models(libraries: list[str]) -> list[WildModel]:
    """List the models of these libraries; importing them is most of the work."""
    make_importable()
    os.environ["DIFFUSERS_VERBOSITY"] = os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
    models: list[WildModel] = []
    if "transformers" in libraries:
        from equivalence_tests.wild.transformers_models import transformers_models

        models += transformers_models()
    if "timm" in libraries:
        from equivalence_tests.wild.timm_models import timm_models

        models += timm_models()
    if "diffusers" in libraries:
        from equivalence_tests.wild.diffusers_models import diffusers_models

        models += diffusers_models()
    return models


def judged_by_checker(attention: Attention) -> Report:
    """Judge an attention where it stands, as a user does: the module, with the call that was seen."""
    from equivalence_tests.checker.verify import verify

    call = attention.call
    found = verify(attention.module, (call.args, dict(call.kwargs)))
    return max(found, key=severity)


def severity(report: Report) -> int:
    """Of several attentions in one call, the worst speaks for it."""
    return ("equal", "partial", "unchecked", "deviates").index(report.verdict)


def only_counted(attention: Attention) -> Report:
    """Leave the checker out."""
    return Report(attention.name, reason="counted only")


def read_progress(path: Path | None) -> list[dict[str, Any]]:
    """Read what an earlier run found out."""
    if path is None or not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def with_reasons(work: Work) -> Work:
    """Let a model that cannot be built or run say so, where it would end its child."""

    @functools.wraps(work)
    def reporting(one: WildModel) -> Iterator[dict[str, Any]]:
        try:
            yield from work(one)
        except Exception as error:  # foreign code fails in any way
            yield {"library": one.library, "model": one.name, "not_built": f"{type(error).__name__}: {error}"[:400]}

    return reporting


@dataclass
class Run:
    """One run over the models of the libraries: what was chosen, and what was found out so far."""

    library: list[str] | None
    model: list[str] | None
    sample: int
    seed: int
    part: str
    resume: Path | None
    jobs: int

    def __post_init__(self) -> None:
        warnings.simplefilter("ignore")  # the libraries' own
        torch.set_num_threads(1)
        self.console = Console()
        models = [
            one for one in listed_models(self.library or list(LIBRARIES)) if not self.model or one.name in self.model
        ]
        draw = random.Random(self.seed)
        self.models = draw.sample(models, min(self.sample, len(models))) if self.sample else models
        names = {(one.library, one.name) for one in self.models}
        self.rows = [item for item in read_progress(self.resume) if (item["library"], item["model"]) in names]
        self.known = {item["key"] for item in self.rows if "key" in item}

    @property
    def chosen(self) -> Any:
        """The part of the attentions to look at; None for all."""
        return None if self.part == "all" else self.part

    def over(self, work: Work, limits: Limits) -> Found:
        """Do the work for every model that no earlier run did, and give all that was found out."""
        done = {(item["library"], item["model"]) for item in self.rows if "ended" in item}
        waiting = [one for one in self.models if (one.library, one.name) not in done]
        for one, found, why in in_children(waiting, with_reasons(work), limits=limits, jobs=self.jobs):
            new = [*found, {"library": one.library, "model": one.name, "ended": why}]
            self.known.update(item["key"] for item in found if "key" in item)
            self.rows += new
            judged = [item for item in found if "key" in item]
            said = ", ".join(
                f"{name} {verdict}" + (f" x{count}" if count > 1 else "")
                for (name, verdict), count in Counter(
                    (x["name"].rpartition(".")[2], x["verdict"]) for x in judged
                ).items()
            )
            reason = next((item["not_built"] for item in found if "not_built" in item), why)
            self.console.print(
                f"{one.library} {one.name}: {said or reason[:200] or '-'}", markup=False, highlight=False
            )
            if self.resume is not None:
                with self.resume.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(item) + "\n" for item in new)
        return [item for item in self.rows if "key" in item]

    @property
    def not_built(self) -> dict[str, str]:
        """The models that could not be built or run, each with the reason."""
        reasons: dict[str, str] = {}
        for item in self.rows:
            reason = item.get("not_built") or item.get("ended")
            if reason:
                reasons.setdefault(f"{item['library']} {item['model']}", reason)
        return reasons

    def facts(self) -> dict[str, Any]:
        """What a result was measured with."""
        versions = {name: importlib.metadata.version(name) for name in ("torch", *LIBRARIES)}
        chosen = {"part": self.part, "sample": self.sample, "seed": self.seed}
        return {
            "versions": versions,
            **chosen,
            "models": len(self.models),
            "models_run": len(self.models) - len(self.not_built),
        }


Libraries = Annotated[list[str] | None, typer.Option(help="Only these; all three otherwise.")]
Models = Annotated[list[str] | None, typer.Option(help="Only these models.")]
Sample = Annotated[int, typer.Option(help="How many models, drawn at random; 0 for all.")]
Seed = Annotated[int, typer.Option(help="Of the sample, and of the mistakes.")]
Part = Annotated[str, typer.Option(help='"development", "held out" or "all".')]
Resume = Annotated[Path | None, typer.Option(help="Keep what is found out here, and go on from there.")]
Output = Annotated[Path | None, typer.Option(help="Write the result here.")]
Jobs = Annotated[int, typer.Option(help="How many children at a time.")]


@app.command()
def check(
    library: Libraries = None,
    model: Models = None,
    sample: Sample = 0,
    seed: Seed = 0,
    part: Part = "development",
    count: Annotated[bool, typer.Option("--count", help="Count the attentions, without the checker.")] = False,
    resume: Resume = None,
    output: Output = None,
    jobs: Jobs = 1,
) -> None:
    """Build the models small, run them, and judge each attention that ran."""
    run = Run(library, model, sample, seed, part, resume, jobs)
    judge = only_counted if count else judged_by_checker
    judged = run.over(lambda one: judged_attentions(one, run.known, run.chosen, judge), Limits())
    unique = list({item["key"]: item for item in judged}.values())
    run.console.print(table(unique))
    run.console.print(f"{len(run.models) - len(run.not_built)} of {len(run.models)} models were built and run.")
    if output is not None:
        written(output, {**run.facts(), "summary": summary(unique)}, unique, run.not_built)


@app.command()
def mutants(
    library: Libraries = None,
    model: Models = None,
    sample: Sample = 0,
    seed: Seed = 0,
    part: Part = "development",
    each: Annotated[int, typer.Option(help="How many mistakes in each attention.")] = 3,
    resume: Resume = None,
    output: Output = None,
    jobs: Jobs = 1,
) -> None:
    """Break each attention that runs in the models, one realistic change at a time, and count what is found."""
    run = Run(library, model, sample, seed, part, resume, jobs)
    tried = run.over(
        lambda one: rows_of_mutants(one, run.known, run.chosen, judged_by_checker, seed, each), Limits(cpu_seconds=180)
    )
    changed = [item for item in tried if "operator" in item]
    run.console.print(mutant_table(changed))
    if output is not None:
        written(output, {**run.facts(), "summary": mutant_summary(changed)}, changed, run.not_built)


if __name__ == "__main__":
    app()
