// Live charts from /status, every two seconds: the changes since the last reading.

import { lines } from "./charts.js";
import { html, pairs, tile } from "./dom.js";
import { milliseconds, number, t } from "./texts.js";
import { driftTile, gpuTile, qualityTile, rolloutTile } from "./monitoring.js";

const SAMPLES = 90; // three minutes
const LATENCY_SAMPLES = 5; // percentiles cover the predictions of ten seconds
const PERCENTILES = { p50: 0.5, p95: 0.95, p99: 0.99 };

/** Charts in `container`. `take(status)` adds a sample; `render()` redraws. */
export function liveView(container) {
  const samples = [];

  function take(status) {
    const sample = { at: performance.now(), status };
    // The counters of a restarted service begin at zero: earlier samples do not apply.
    if (samples.length && total(status) < total(samples.at(-1).status)) samples.length = 0;
    samples.push(sample);
    samples.splice(0, samples.length - SAMPLES);
    render();
  }

  function render() {
    const status = samples.at(-1)?.status;
    if (!status) return container.replaceChildren(html("p", { class: "soft" }, t("live.waiting")));
    const tiles = [
      requestsTile(samples),
      latencyTile(samples),
      countsTile(status),
      driftTile(status.drift),
      qualityTile(status),
      rolloutTile(status.rollout),
      gpuTile(status.gpu),
    ];
    container.replaceChildren(...tiles.filter(Boolean));
  }

  return { take, render };
}

const total = (status) =>
  Object.values(status.traffic.requests_by_code).reduce((sum, count) => sum + count, 0);
const failed = (status) =>
  Object.entries(status.traffic.requests_by_code).reduce(
    (sum, [code, count]) => sum + (Number(code) >= 400 ? count : 0),
    0,
  );

/** `measure(before, now)` for each sample and the one `back` samples earlier, or null. */
function since(samples, back, measure) {
  return samples.map((sample, index) =>
    index ? measure(samples[Math.max(0, index - back)], sample) : null,
  );
}

function requestsTile(samples) {
  const rate = (count) =>
    since(
      samples,
      1,
      (before, now) => ((count(now.status) - count(before.status)) * 1000) / (now.at - before.at),
    );
  const series = [
    { name: t("live.all"), values: rate(total), kind: "one" },
    { name: t("live.refused"), values: rate(failed), kind: "bad" },
  ];
  return tile(
    t("live.requests"),
    lines(series, SAMPLES, t("live.requests"), (value) => `${number(value, 3)}/s`),
  );
}

function latencyTile(samples) {
  const series = Object.entries(PERCENTILES).map(([name, share], index) => ({
    name,
    kind: ["one", "two", "three"][index],
    values: since(samples, LATENCY_SAMPLES, (before, now) =>
      quantile(before.status.traffic.latency_buckets, now.status.traffic.latency_buckets, share),
    ),
  }));
  const overall = samples.at(-1).status.traffic.latency_ms;
  return tile(
    t("live.latency"),
    lines(series, SAMPLES, t("live.latency"), milliseconds),
    html(
      "p",
      { class: "soft small" },
      t(
        "live.overall",
        Object.fromEntries(
          Object.entries(overall).map(([name, value]) => [name, milliseconds(value)]),
        ),
      ),
    ),
  );
}

/** The `share` quantile of latency between two samples, in milliseconds; null without data. */
export function quantile(before, now, share) {
  const counts = now.map(([bound, count], index) => [bound, count - (before[index]?.[1] ?? 0)]);
  const wanted = share * (counts.at(-1)?.[1] ?? 0);
  if (!(wanted > 0)) return null;
  let [below, lower] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= wanted && count > below)
      return (
        1000 *
        (bound === null ? lower : lower + ((bound - lower) * (wanted - below)) / (count - below))
      );
    [below, lower] = [count, bound ?? lower];
  }
  return 1000 * lower;
}

function countsTile({ traffic }) {
  const errors = Object.entries(traffic.errors_by_code);
  return tile(
    t("live.counts"),
    pairs(
      [
        [t("live.predictions"), number(traffic.predictions)],
        [t("live.queue"), number(traffic.queue_depth)],
        [t("live.workers"), number(traffic.workers_ready)],
        ...Object.entries(traffic.requests_by_code).map(([code, count]) => [
          `HTTP ${code}`,
          number(count),
        ]),
      ],
      "counts",
    ),
    errors.length ? html("h4", {}, t("live.errors")) : null,
    errors.length
      ? pairs(
          errors.map(([code, count]) => [html("code", {}, code), number(count)]),
          "counts",
        )
      : null,
  );
}
