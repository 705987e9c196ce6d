// Tiles of the monitoring: drift, quality with and without labels, rollouts, GPUs.

import { limited, lines } from "./charts.js";
import { html, pairs, tile } from "./dom.js";
import { known, number, percent, t } from "./texts.js";

const MOST_FEATURES = 10;
const MOST_WINDOWS = 30;
const MOST_EVENTS = 4;
const OWN = "SLIPWAY_BUNDLE"; // the stable model if none was rolled out
const STATES = {
  monitoring: "drift.none",
  starting: "drift.starting",
  "the bundle has no reference for drift": "drift.no_reference",
};
const SHORT = { dateStyle: "short", timeStyle: "short" };

const range = ({ value, low, high }) => `${number(value)} (${number(low)} – ${number(high)})`;
const moment = (seconds) =>
  new Date(seconds * 1000).toLocaleString(document.documentElement.lang, SHORT);
const unreadable = () => html("p", { class: "problem" }, t("live.unreadable"));

/** The last window, feature by feature, and the windows before it. */
export function driftTile(drift) {
  if (!drift) return null;
  if (drift.failed) return tile(t("drift.title"), unreadable());
  const { open_window: open, windows = [] } = drift;
  if (!drift.verdict) {
    const state = STATES[drift.state] ? t(STATES[drift.state]) : drift.state;
    return tile(t("drift.title"), html("p", {}, state), openWindow(drift, open));
  }
  const features = drift.features.slice(0, MOST_FEATURES);
  const rows = features.map((feature) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, known(`feature.${feature.name}`, feature.name)),
      html("td", { class: "wide" }, limited(Math.abs(feature.value), feature.threshold)),
      html(
        "td",
        { class: "number" },
        number(Math.abs(feature.value), 3),
        html("span", { class: "soft" }, ` / ${number(feature.threshold, 3)}`),
      ),
    ),
  );
  const strengths = windows
    .slice(0, MOST_WINDOWS)
    .reverse()
    .map((window) => window.strongest?.strength ?? null);
  const series = [
    { name: t("drift.strongest"), values: strengths, kind: "one" },
    { name: t("drift.limit"), values: strengths.map(() => 1), kind: "bad" },
  ];
  return tile(
    t("drift.title"),
    html(
      "p",
      { class: drift.verdict === "drifted" ? "problem" : "" },
      t(`drift.${drift.verdict}`, { rows: number(drift.rows), when: moment(drift.closed) }),
    ),
    html("table", { class: "bars" }, html("tbody", {}, rows)),
    html("p", { class: "soft small" }, t("drift.hint")),
    strengths.length > 1
      ? lines(series, MOST_WINDOWS, t("drift.windows"), (value) => number(value, 2))
      : null,
    openWindow(drift, open),
    drift.proposal ? proposal(drift.proposal) : null,
    Object.keys(drift.faults ?? {}).length ? unreadable() : null,
  );
}

function openWindow(drift, open) {
  if (!open) return null;
  const counts = { rows: number(open.rows), all: number(drift.window_rows) };
  return html("p", { class: "soft small" }, t("drift.open", counts));
}

function proposal({ closed, path }) {
  const text = t("drift.proposal", { when: moment(closed) });
  return html("p", {}, text, " ", html("code", {}, path));
}

/** Quality estimated without labels, and quality measured by feedback. */
export function qualityTile({ drift, feedback }) {
  if (!feedback || feedback.failed) return null;
  const estimate = drift?.estimate;
  const measured = Object.entries(feedback.quality ?? {});
  const count = number(feedback.of_the_last);
  return tile(
    t("quality.title"),
    pairs([
      estimate?.metric
        ? [
            t("quality.estimated", { metric: metricName(estimate.metric) }),
            estimate.valid ? range(estimate) : t("quality.invalid"),
          ]
        : null,
      ...measured.map(([name, metric]) => [
        t("quality.true", { metric: metricName(name), rows: number(metric.rows) }),
        html(
          "span",
          { class: metric.is_worse ? "problem" : null },
          range(metric),
          metric.tested ? testedQuality(metric.tested) : null,
        ),
      ]),
    ]),
    estimate && !estimate.valid && estimate.reason
      ? html("p", { class: "soft small", lang: "en" }, estimate.reason)
      : null,
    measured.length
      ? html("p", { class: "soft small" }, t("quality.hint", { count }))
      : html("p", { class: "soft" }, t("quality.none")),
  );
}

const testedQuality = ({ value }) =>
  html("span", { class: "soft" }, ` ${t("quality.tested", { value: number(value) })}`);
const metricName = (name) => known(`metric.${name}`, name);

/** The candidate, its progress, the evidence against it and the last events, if there are any. */
export function rolloutTile(rollout) {
  if (!rollout) return null;
  if (rollout.failed) return tile(t("rollout.title"), unreadable());
  const { stable, candidate, workers, events } = rollout;
  if (!rollout.revision) return null;
  const problems = workers.filter((worker) => worker.problem);
  return tile(
    t("rollout.title"),
    pairs([
      [t("rollout.stable"), stable === OWN ? t("rollout.own") : html("code", {}, stable)],
      ...(candidate ? candidateRows(candidate) : []),
      ...problems.map((worker) => [
        t("rollout.worker", { process: worker.process }),
        html("span", { class: "problem" }, worker.problem),
      ]),
    ]),
    candidate ? evidence(candidate) : null,
    events.length ? html("h4", {}, t("rollout.events")) : null,
    events.slice(-MOST_EVENTS).reverse().map(eventLine),
  );
}

function eventLine(event) {
  const when = html("span", { class: "soft" }, moment(Date.parse(event.time) / 1000));
  const text = ` ${event.what} ${event.model ?? ""} ${event.reason ?? ""}`;
  return html("p", { class: "small" }, when, text);
}

function candidateRows({ version, mode, phase, fraction, step, steps, requests, shadowed }) {
  const stepText = steps?.length ? ` (${step} / ${steps.length})` : "";
  return [
    [t("rollout.candidate"), html("code", {}, version)],
    [t("rollout.phase"), `${mode}, ${phase}`],
    [t("rollout.fraction"), percent(fraction) + stepText],
    [t("rollout.requests"), number(requests.candidate)],
    shadowed.agreement === null ? null : [t("rollout.agreement"), percent(shadowed.agreement, 2)],
  ];
}

function evidence({ log_evidence: found, log_threshold: threshold }) {
  const rows = Object.entries(found).map(([test, value]) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, test.replaceAll("_", " ")),
      html("td", { class: "wide" }, limited(Math.max(0, value), threshold)),
      html("td", { class: "number" }, number(value, 2)),
    ),
  );
  const table = html("table", { class: "bars" }, html("tbody", {}, rows));
  return [html("h4", {}, t("rollout.evidence")), table];
}

export function gpuTile(gpu) {
  if (!gpu?.gpus?.length) return null;
  const gibibytes = (bytes) => number(bytes / 2 ** 30, 3);
  const rows = gpu.gpus.flatMap((one) => [
    [t("gpu.utilization", { gpu: one.gpu }), percent(one.utilization_ratio, 0)],
    [
      t("gpu.memory", { gpu: one.gpu }),
      `${gibibytes(one.memory_used_bytes)} / ${gibibytes(one.memory_total_bytes)} GiB`,
    ],
    [t("gpu.temperature", { gpu: one.gpu }), `${number(one.temperature_celsius)} °C`],
  ]);
  return tile(t("gpu.title"), pairs(rows));
}
