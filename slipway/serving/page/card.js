// Model info and certificate from /model: quality, agreement, requested and actual execution.

import { html, pairs, tile } from "./dom.js";
import { known, milliseconds, number, percent, t } from "./texts.js";

/** The model info as an element. */
export function modelCard(card) {
  return html(
    "div",
    { class: "tiles" },
    aboutTile(card),
    metricsTile(card),
    executionTile(card),
    certificateTile(card),
    lineageTile(card),
  );
}

function wide(title, ...content) {
  const made = tile(title, content);
  made.classList.add("whole");
  return made;
}

function table(heads, rows) {
  return html(
    "div",
    { class: "scroll", tabindex: "0" },
    html(
      "table",
      {},
      html(
        "thead",
        {},
        html(
          "tr",
          {},
          heads.map((head) => html("th", { scope: "col" }, head)),
        ),
      ),
      html(
        "tbody",
        {},
        rows.map((cells) =>
          html(
            "tr",
            {},
            cells.map((cell) => html("td", { class: cell?.length > 40 ? "words" : null }, cell)),
          ),
        ),
      ),
    ),
  );
}

function aboutTile(card) {
  const { input, labels, calibration } = card;
  const takes =
    input.kind === "images"
      ? t("model.images", {
          size: input.size_px,
          channels: t(input.channels === 1 ? "model.grey" : "model.colour"),
        })
      : input.tokenizer
        ? t("model.tokens", { count: number(input.tokenizer.max_tokens) })
        : input.kind === "texts"
          ? t("model.texts", { count: number(input.max_bytes) })
          : t("model.columns", { count: input.columns.length });
  const shown =
    labels.slice(0, 20).join(", ") + (labels.length > 20 ? `, … (${number(labels.length)})` : "");
  const { threshold } = calibration.conformal;
  return tile(
    t("model.about"),
    pairs([
      [t("model.version"), html("code", {}, card.model_version)],
      [t("model.task"), known(`task.${card.task}`, card.task)],
      [t("model.takes"), takes],
      input.ignored?.length ? [t("model.ignored"), input.ignored.join(", ")] : null,
      labels.length ? [t("model.labels"), shown] : null,
      [
        t("model.coverage"),
        threshold === null
          ? t("model.no_coverage")
          : [coverageOf(card.coverage), coverageDoubts(card.coverage)],
      ],
    ]),
  );
}

function coverageOf({ target, measured }) {
  const found = measured
    ? t("model.covered", {
        measured: percent(measured.value),
        low: percent(measured.low),
        high: percent(measured.high),
        rows: number(measured.rows),
      })
    : t("model.unmeasured");
  return html("span", {}, t("model.target", { target: percent(target) }), " ", found);
}

/** Caveats of the coverage; null if there are none. */
export function coverageDoubts({ verdict, measured, few_rows: isFew, fitting_rows: rows }) {
  const doubts = [];
  if (measured && verdict !== "within")
    doubts.push(
      t(verdict === "below" ? "coverage.below" : "coverage.above", {
        low: percent(measured.low),
        high: percent(measured.high),
      }),
    );
  if (isFew) doubts.push(t("coverage.few_rows", { rows: number(rows) }));
  return doubts.length
    ? html(
        "p",
        { class: `coverage-doubt small ${verdict === "above" ? "soft" : "notice"}` },
        doubts.join(" "),
      )
    : null;
}

function metricsTile({ metrics, baseline, labels, calibration }) {
  const rows = Object.entries(metrics).map(([name, metric]) => [
    known(`metric.${name}`, name),
    number(metric.value),
    `${number(metric.low)} – ${number(metric.high)}`,
    number(metric.rows),
    besideBaseline(metric.value, baseline[name]),
  ]);
  const confidence = Object.values(metrics)[0]?.confidence;
  const made = tile(
    t("model.metrics"),
    table(
      [
        t("model.metric"),
        t("model.value"),
        t("model.interval", { confidence: percent(confidence, 0) }),
        t("model.rows"),
        t("model.baseline"),
      ],
      rows,
    ),
  );
  made.append(
    html(
      "p",
      { class: "soft" },
      t(
        calibration.thresholds && !calibration.decision
          ? "model.baseline_labels"
          : labels.length
            ? "model.baseline_class"
            : "model.baseline_value",
      ),
    ),
  );
  made.classList.add("double"); // five columns, none of which may be cut
  return made;
}

/** The value of the baseline, and the difference to it. */
function besideBaseline(value, baseline) {
  if (baseline === undefined) return "–";
  const difference = value - baseline;
  return `${number(baseline)} (${difference < 0 ? "−" : "+"}${number(Math.abs(difference))})`;
}

function executionTile({ execution, golden_rows, rebuild }) {
  const { requested, actual, why, passed_over: passedOver } = execution;
  return wide(
    t("model.execution"),
    pairs([
      [t("model.requested"), `${requested.provider} / ${requested.variant}`],
      [
        t("model.actual"),
        `${actual.backend} / ${actual.provider} / ${actual.variant} (${actual.precision})`,
      ],
      why ? [t("model.why"), html("ul", { lang: "en" }, html("li", {}, why))] : null,
      passedOver.length
        ? [
            t("model.passed_over"),
            html(
              "ul",
              { lang: "en" },
              passedOver.map((reason) => html("li", {}, reason)),
            ),
          ]
        : null,
      [t("model.batch"), number(execution.max_batch_size)],
      golden_rows ? [t("model.golden"), t("model.golden_rows", { rows: golden_rows.rows })] : null,
      rebuild && !["not_requested", "not_needed"].includes(rebuild.status)
        ? [t("model.rebuild"), `${rebuild.status}: ${rebuild.reason}`]
        : null,
    ]),
  );
}

function certificateTile({ certificate }) {
  const rows = certificate.hops.map((hop) => [
    hop.name,
    html("span", { class: `state small ${hop.status}` }, known(`hop.${hop.status}`, hop.status)),
    hop.status === "not_executed" ? "–" : number(hop.rows),
    hop.max_difference === null ? "–" : number(hop.max_difference, 2),
    hop.metric === null ? "–" : number(hop.metric.value),
    milliseconds(hop.latency_ms),
    hop.reason,
  ]);
  const heads = ["hop", "state", "rows", "difference", "metric", "latency", "reason"].map((name) =>
    name === "metric"
      ? known(`metric.${certificate.metric}`, certificate.metric)
      : t(`hop.${name}`),
  );
  const numOf = (isWanted) => certificate.hops.filter(({ status }) => isWanted(status)).length;
  const agree = numOf((status) => status === "agrees");
  const run = numOf((status) => status !== "not_executed");
  return wide(
    t("model.certificate"),
    html("p", {}, t("model.agree", { agree, run })),
    html("p", {}, t(`model.gates.${certificate.gates}`)),
    table(heads, rows),
  );
}

function lineageTile({ lineage, bundle_digest: digest, versions }) {
  return wide(
    t("model.lineage"),
    pairs([
      [t("model.digest"), html("code", {}, digest)],
      lineage.git_revision
        ? [
            t("model.revision"),
            html(
              "code",
              {},
              lineage.git_revision + (lineage.git_dirty ? ` (${t("model.dirty")})` : ""),
            ),
          ]
        : null,
      lineage.data
        ? [
            t("model.data"),
            html("code", {}, `${lineage.data.path} (${lineage.data.hash} ${lineage.data.digest})`),
          ]
        : null,
      [
        t("model.versions"),
        Object.entries(versions)
          .map(([name, version]) => `${name} ${version}`)
          .join(", "),
      ],
    ]),
  );
}
