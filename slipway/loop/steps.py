"""Takes the steps of the loop on a real project and service.

Each step calls the function behind the verb that a person would use, and returns the detail for the
journal. If the process is killed before the journal has the step, the next call repeats it: files
are replaced, a finished experiment is used again, and a rollout that was already proposed is
recognised by its reason in the history. slipway/loop/facts.py collects the facts.
"""

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import read_certificate
from slipway.artifacts.locations import BUNDLE, CERTIFICATE, ENGINE, MODEL, PACKED
from slipway.config import edit
from slipway.config.params import load_params, value_at
from slipway.data.merge.__main__ import merge, merged_params
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.sources import find_layout
from slipway.data.store.packed import open_split, read_manifest
from slipway.experiments.records import ExperimentRecord, free_name, read_records
from slipway.experiments.run import PARAMS, ExperimentRequest
from slipway.experiments.run import run as run_pipeline
from slipway.export.reference_model import answer_test_rows, open_reference
from slipway.loop.comparison import compare_models, judge
from slipway.loop.decision_page import PAGE, decision_page
from slipway.loop.decisions import REQUEST, new_request, read_request
from slipway.loop.facts import ObservedProject, mark_of
from slipway.loop.journal import Cycle, LoopError, StepName
from slipway.loop.label_keys import KeyRecord, key_name
from slipway.loop.machine import Action, NextStep
from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.serving.rollout import commands
from slipway.serving.rollout.history import Author
from slipway.serving.rollout.state import RolloutPlan
from slipway.system import files
from slipway.system.errors import LockedError, SlipwayError
from slipway.traffic.collect import column_names, write_rows
from slipway.traffic.monitoring_records import (
    is_chosen,
    read_drifted_spans,
    read_ground_truth,
    read_judged_windows,
)
from slipway.traffic.selection import LoggedItem, collect

DATA = Path("data/loop")
WEIGHTS = MODEL / "weights.safetensors"
_MODEL = "model.json"  # beside the weights
_WEBHOOK_S = 10.0
DONE: dict[Action, StepName] = {
    "trigger": "triggered", "collect": "collected", "merge": "merged", "train": "trained",
    "compare": "compared", "shadow": "shadowed", "request": "requested", "notify": "notified",
    "canary": "canary", "end": "ended",
}  # fmt: skip


class LoopProject(ObservedProject):
    """The project in the working directory, with the steps that change it."""

    def take(self, step: NextStep, cycle: Cycle, now: float) -> dict[str, Any]:
        """Take one step of a cycle, and return its detail for the journal."""
        match step.action:
            case "trigger":
                return self._trigger(step)
            case "collect":
                return self._collect(cycle)
            case "merge":
                return self._merge(cycle)
            case "train":
                return self._train(cycle)
            case "compare":
                return self._compare(cycle)
            case "shadow" | "canary":
                return self._propose(cycle, step.action)
            case "request":
                return self._request(cycle, now)
            case "notify":
                return self._notify(cycle)
            case "end":
                return self._end(cycle, step)
        raise AssertionError(step.action)

    def _trigger(self, step: NextStep) -> dict[str, Any]:
        bundle = self.served()
        drift = self.drift(bundle.version, 0.0) if self.loop.triggers.drift else None
        return {
            "reasons": step.why.split("; "),
            "since": drift[1] if drift else 0.0,
            "served": bundle.version,
        }

    def _collect(self, cycle: Cycle) -> dict[str, Any]:
        """Collect the labelled rows of all keys that are not suspicious."""
        bundle, state = self.served(), self.settings.state
        refused = self.refused_keys(bundle)
        names = {record.key for record in refused}
        every = list(read_ground_truth(state))
        labels = [label for label in every if key_name(label.caller) not in names]
        manifest = bundle.manifest
        collected = collect(
            self.request_log,
            labels,
            read_drifted_spans(state),
            manifest.input,
            manifest.output.labels,
        )
        if not collected.items:
            raise LoopError(
                f"no labelled row is in {self.request_log}, but {len(labels)} labels are known; "
                "expected the logged requests. Check SLIPWAY_REQUEST_LOG_DIRECTORY and its "
                "retention."
            )
        place = DATA / f"{cycle.number:04d}"
        callers = {(label.request_id, label.item): key_name(label.caller) for label in labels}
        since = cycle.detail("triggered")["since"]

        def key_of(item: LoggedItem) -> str:
            """Return the key of a recent row, "" of another one.

            Rows from before the trigger, and rows that the label queue chose, are used for training
            but not for the comparison and the drift reference.
            """
            caller = callers[item.key[:2]]
            return caller if item.key[2] >= since and not is_chosen(caller) else ""

        collected.items.sort(key=lambda item: (bool(key_of(item)), item.key[2]))
        keys = [key_of(item) for item in collected.items]
        files.write_json(place / "keys.json", keys)
        files.write_json(place / "answered.json", [item.key[2] for item in collected.items])
        out = place / "collected.parquet"
        write_rows(out, collected, manifest, column_names(manifest))
        return {
            "path": out.as_posix(),
            "keys": (place / "keys.json").as_posix(),
            "answered": (place / "answered.json").as_posix(),
            "sha256": files.sha256_file(out),
            "rows": len(collected.items),
            "recent_from": keys.count("") if since else None,  # without drift, as in the base data
            "left_out": dict(collected.left_out),
            "labels_of_refused_keys": len(every) - len(labels),
            "refused_keys": [record.model_dump() for record in refused],
        }

    def _merge(self, cycle: Cycle) -> dict[str, Any]:
        params, collected = self.params, cycle.detail("collected")
        data = unpacked(params.data, ArchiveLimits.of(params.clean))
        if find_layout(data).given:
            raise LoopError(
                f"the folders or shards of {data.path!r} are a given split, and collected rows "
                "would all be for training; expected rows that Slipway splits. Set "
                "data.split_folders: pool"
            )
        _require_digest(collected)
        out = Path(collected["path"]).with_name("next.parquet")
        report = merge(data, Path(collected["path"]), out, collected.get("recent_from"))
        if not report.added:
            raise LoopError(
                f"{data.path} has all {report.num_duplicates} collected rows already, expected new "
                "ones. End the cycle with `slipway loop stop`; the next one collects later labels."
            )
        keys, answered = (
            json.loads(Path(collected[name]).read_bytes()) for name in ("keys", "answered")
        )
        assignments = merged_params(data, out)
        content = params.model_dump(mode="json")
        names = [one.partition("=")[0] for one in assignments]
        if self.loop.start == "served":
            weights = self._served_weights(cycle)
            assignments.append(f"train.pretrained={weights}")
            names.append("train.pretrained")
        return {
            "path": out.as_posix(),
            "sha256": files.sha256_file(out),
            "base_rows": report.num_base,
            "keys": [keys[index] for index in report.added],
            "answered": [answered[index] for index in report.added],
            "conflicts": len(report.conflicts),
            "assignments": assignments,
            "before": {name: value_at(content, name) for name in names},
        }

    def _served_weights(self, cycle: Cycle) -> Path:
        """Copy the served model's weights to the folder of the cycle's data; return the copy."""
        bundle = self.served()
        wanted = bundle.manifest.lineage.digests.get(WEIGHTS.as_posix())
        known = [WEIGHTS, *sorted(self.folder.glob(f"*/{WEIGHTS.name}"))]
        for path in known:
            if path.is_file() and wanted == files.sha256_file(path):
                out = DATA / f"{cycle.number:04d}" / "served" / WEIGHTS.name
                files.write_bytes(out, path.read_bytes())
                if (beside := path.with_name(_MODEL)).is_file():
                    files.write_bytes(out.with_name(_MODEL), beside.read_bytes())
                return out
        raise LoopError(
            f"loop.start is 'served', but the weights of {bundle.version} are not in {WEIGHTS}; "
            "expected the file that its training wrote. Bring it back with `slipway take NAME` "
            "of the experiment that trained it, or set loop.start: scratch"
        )

    def _train(self, cycle: Cycle) -> dict[str, Any]:
        merged = cycle.detail("merged")
        _require_digest(merged)
        record = self._finished_run(cycle)
        if record is None:
            taken = {record.name for record in read_records()}
            name = free_name(f"loop-{cycle.number}", taken, first=1)
            request = ExperimentRequest(merged["assignments"], name=name, is_quiet=True)
            record = run_pipeline(request)
        if record.status == "interrupted":
            raise KeyboardInterrupt
        if record.status != "done":
            raise LoopError(f"the experiment {record.name} failed: {record.reason}")
        return self._copied_candidate(cycle, record)

    def _finished_run(self, cycle: Cycle) -> ExperimentRecord | None:
        """Return this cycle's finished experiment if its bundle is still in artifacts/."""
        for record in read_records():
            if record.name.startswith(f"loop-{cycle.number}-") and record.status == "done":
                try:
                    found = load_bundle(BUNDLE).manifest.lineage.params["data"]["path"]
                except (SlipwayError, KeyError):
                    return None
                return record if found == cycle.detail("merged")["path"] else None
        return None

    def _copied_candidate(self, cycle: Cycle, record: ExperimentRecord) -> dict[str, Any]:
        """Copy the candidate's bundle, so that a later training cannot replace it.

        Returns what the journal records of the step `trained`: paths, versions and digests. Raises
        LoopError if the bundle was made from other data, or from data without a digest.
        """
        bundle = load_bundle(BUNDLE)
        bundle.verify()
        lineage, merged = bundle.manifest.lineage, cycle.detail("merged")
        if lineage.params.get("data", {}).get("path") != merged["path"]:
            raise LoopError(
                f"{BUNDLE} was made from {lineage.params.get('data', {}).get('path')!r}, expected "
                f"{merged['path']!r}: another run came between. Run `slipway loop` again."
            )
        if lineage.data is None:
            raise LoopError(
                f"the digest of the data of {bundle.version} is unknown, expected one in dvc.lock: "
                "nobody could say later what it was trained on. Run it by `slipway run`, with "
                "data.path as a dependency of the stage clean in dvc.yaml."
            )
        with files.new_directory(self.place(cycle.number)) as folder:
            (folder / "bundle").mkdir()
            for name in bundle.file_names:
                shutil.copyfile(BUNDLE / name, folder / "bundle" / name)
            shutil.copyfile(CERTIFICATE, folder / CERTIFICATE.name)
            if ENGINE.is_dir():
                shutil.copytree(ENGINE, folder / ENGINE.name)
            if self.loop.start == "served":
                shutil.copyfile(WEIGHTS, folder / WEIGHTS.name)
                shutil.copyfile(WEIGHTS.with_name(_MODEL), folder / _MODEL)
            copied = load_bundle(folder / "bundle")
            copied.verify()
            certificate = read_certificate(folder / CERTIFICATE.name)
            return {
                "experiment": record.name,
                "version": copied.version,
                "bundle_digest": copied.digest,
                "certificate_digest": files.sha256_file(folder / CERTIFICATE.name),
                "data_digest": lineage.data.digest,
                "packed_digest": lineage.digests.get((PACKED / "manifest.json").as_posix()),
                "gates": certificate.gates,
            }

    def _compare(self, cycle: Cycle) -> dict[str, Any]:
        trained, merged = cycle.detail("trained"), cycle.detail("merged")
        if files.sha256_file(PACKED / "manifest.json") != trained["packed_digest"]:
            raise LoopError(
                f"{PACKED} was packed again since {trained['version']} was made, expected its "
                f"rows. Bring them back: slipway take {trained['experiment']}"
            )
        served = self.served()
        self._require_same_split(served)
        params = load_params()
        manifest = read_manifest(PACKED)
        test = open_split(PACKED, manifest, "test")
        candidate = open_reference(self.place(cycle.number) / "bundle", manifest)
        answers = [
            answer_test_rows(
                open_reference(bundle.root, manifest), test, PACKED, manifest, lambda: params.data
            )
            for bundle in (served, candidate)
        ]
        rows = [int(source.partition(":")[0]) - merged["base_rows"] for source in test.sources]
        own = RowAnswers(
            manifest.task, test.targets, answers[1].outputs, thresholds=answers[1].thresholds
        )
        refused = [
            KeyRecord.model_validate(one).text for one in cycle.detail("collected")["refused_keys"]
        ]
        evaluate = params.evaluate
        comparison = compare_models(
            answers[0],
            own,
            [merged["keys"][row] if row >= 0 else None for row in rows],
            [merged["answered"][row] if row >= 0 else 0.0 for row in rows],
            Resampling(params.seed, evaluate.bootstrap_samples, evaluate.confidence),
            refused,
            self.loop.trusted_keys,
        )
        outcome, why = judge(comparison, trained["gates"], self.loop)
        return {"outcome": outcome, "why": why, "comparison": comparison.model_dump(mode="json")}

    def _require_same_split(self, served: LoadedBundle) -> None:
        """Raise LoopError if the served model may have been trained on present test rows."""
        before = served.manifest.lineage.params
        now = self.params.model_dump(mode="json")
        changed = [name for name in ("seed", "split") if before.get(name) != now[name]]
        if changed:
            raise LoopError(
                f"{served.version} was trained with another {' and '.join(changed)}, expected the "
                "present values of params.yaml: it may have been trained on present test rows. "
                "Train and deploy a model with these values first."
            )

    def _propose(self, cycle: Cycle, mode: Action) -> dict[str, Any]:
        """Propose the candidate as a shadow or a canary, unless this cycle already has."""
        assert mode in ("shadow", "canary")
        trained = cycle.detail("trained")
        if self.stage_of(cycle, mode):
            return {"version": trained["version"]}
        facts = self.candidate_facts(cycle)
        author = Author("slipway loop", f"{mark_of(cycle)} compared on copies of live requests")
        if mode == "canary":
            decided = cycle.detail("decided")
            author = Author(decided["by"], f"{mark_of(cycle)} {decided['reason']}")
            if facts.shadow == "running":
                commands.abort(self.settings, Author("slipway loop", f"{mark_of(cycle)} decided"))
        place, canary = self.place(cycle.number), self.loop.canary
        copy = load_bundle(place / "bundle")
        if copy.digest != trained["bundle_digest"]:
            raise LoopError(
                f"{place / 'bundle'} is {copy.version}, expected {trained['version']}, which was "
                "compared and decided on. Restore the folder from a backup, or reject."
            )
        try:
            commands.propose(
                self.settings,
                mode,
                place / "bundle",
                plan=RolloutPlan(
                    steps=tuple(canary.steps),
                    hold_s=canary.hold_seconds,
                    hold_requests=canary.hold_requests,
                ),
                author=author,
            )
        except LockedError:
            raise
        except SlipwayError as error:
            raise LoopError(f"{trained['version']} was refused as a {mode}: {error}") from error
        return {"version": trained["version"]}

    def _request(self, cycle: Cycle, now: float) -> dict[str, Any]:
        path = self.place(cycle.number) / REQUEST
        trained, compared = cycle.detail("trained"), cycle.detail("compared")
        if not path.exists():  # else a killed process wrote it, and somebody may have read it
            triggered = cycle.detail("triggered")
            request = new_request(
                cycle=cycle.number,
                created=now,
                expires=now + self.loop.decision_days * 86400,
                reasons=triggered["reasons"],
                replaces=triggered["served"],
                comparison=compared["comparison"],
                why=compared["why"],
                **{
                    name: trained[name]
                    for name in (
                        *("version", "bundle_digest", "certificate_digest", "data_digest"),
                        *("gates", "experiment"),
                    )
                },
            )
            files.write_text(
                path, files.canonical_json(request.model_dump(mode="json")), files.PRIVATE
            )
        request = read_request(path)
        windows = read_judged_windows(self.settings.state, request.replaces)
        files.write_text(path.with_name(PAGE), decision_page(path.parent, windows), files.PRIVATE)
        return {
            "path": path.relative_to(self.folder).as_posix(),
            "digest": files.sha256_file(path),
            "version": request.version,
            "expires": request.expires,
        }

    def _notify(self, cycle: Cycle) -> dict[str, Any]:
        """Send the decision request to the web hook; its id lets the receiver drop a repetition."""
        requested = cycle.detail("requested")
        path = self.folder / requested["path"]
        assert self.loop.webhook is not None
        call = urllib.request.Request(
            self.loop.webhook,
            data=path.read_bytes(),
            headers={
                "Content-Type": "application/json",
                "Idempotency-Key": read_request(path).id,
            },
        )
        try:
            with urllib.request.urlopen(call, timeout=_WEBHOOK_S) as answer:
                return {"status": answer.status}
        except (OSError, ValueError) as error:
            raise LoopError(
                f"loop.webhook {self.loop.webhook} did not take the request ({error}), expected a "
                "status of 2xx. The request itself is in the state folder: slipway loop --status"
            ) from error

    def _end(self, cycle: Cycle, step: NextStep) -> dict[str, Any]:
        """End the cycle; unless the candidate was promoted, restore the values of params.yaml."""
        if step.outcome != "promoted":
            facts = self.candidate_facts(cycle)
            if facts.shadow == "running" or facts.canary == "running":
                author = Author("slipway loop", f"{mark_of(cycle)} {step.outcome}")
                commands.abort(self.settings, author)
            if cycle.has("merged"):
                edit.propose(PARAMS, cycle.detail("merged")["before"], apply=True)
        return {"outcome": step.outcome, "why": step.why}


def _require_digest(detail: dict[str, Any]) -> None:
    path = Path(detail["path"])
    if not path.is_file() or files.sha256_file(path) != detail["sha256"]:
        raise LoopError(
            f"{path} is missing or was changed since the loop wrote it, expected SHA-256 "
            f"{detail['sha256'][:12]}. Restore it, or end the cycle: slipway loop stop"
        )
