// Answers, item by item: text and bars, an explanation, feedback.

import { bodyOf, call } from "./api.js";
import { coverageDoubts } from "./card.js";
import { bar, twoSided } from "./charts.js";
import { html } from "./dom.js";
import { known, milliseconds, number, percent, t } from "./texts.js";

const MOST_ENTRIES = 24;
const MOST_BARS = 10;
const MOST_COLUMNS = 12;
const MOST_LABELS = 500; // a longer list becomes a text field with proposals
const HARDLY = 0.01; // a negligible change of probability
const EXPLAIN_TRIES = 8;

/**
 * The list of answers in `container`. `announce` sends a text to screen readers. `facts()`
 * returns the model info and whether feedback is accepted.
 */
export function answerList(container, announce, facts) {
  const entries = [];
  let last = 0;

  /** Predicts `item` ({name, file} or {name, row}). Rejects if the service refuses it. */
  async function ask(item, { explain }) {
    const entry = {
      number: ++last,
      item,
      url: item.file ? URL.createObjectURL(item.file) : null,
      state: "waiting",
    };
    entries.unshift(entry);
    for (const old of entries.splice(MOST_ENTRIES)) if (old.url) URL.revokeObjectURL(old.url);
    render();
    try {
      const { content, milliseconds: took } = await call("predict", bodyOf(item));
      Object.assign(entry, { state: "answered", answer: content, took });
      announce(`${item.name}: ${spoken(content)}`);
    } catch (refused) {
      Object.assign(entry, { state: "refused", refused });
      announce(`${item.name}: ${problem(refused)}`);
      throw refused;
    } finally {
      render(entry);
    }
    if (explain) await explainEntry(entry);
  }

  async function explainEntry(entry) {
    entry.explaining = true;
    entry.explainProblem = null;
    render(entry);
    try {
      entry.explanation = (
        await patiently(() =>
          call("explain", { ...bodyOf(entry.item), requestId: entry.answer.request_id }),
        )
      ).content.explanation;
    } catch (refused) {
      entry.explainProblem = refused; // rendered in the current language
    }
    entry.explaining = false;
    render(entry);
  }

  async function sendTruth(entry, truth) {
    entry.feedback = "sending";
    render(entry);
    try {
      const { content } = await call("feedback", {
        method: "POST",
        contentType: "application/json",
        body: JSON.stringify({ request_id: entry.answer.request_id, ground_truth: truth }),
      });
      entry.feedback = content.joined ? "sent" : "waiting";
      announce(t(`feedback.${entry.feedback}`));
    } catch (refused) {
      entry.feedback = null;
      entry.feedbackProblem = problem(refused);
    }
    render(entry);
  }

  function render(entry) {
    if (!entry || !entry.node?.isConnected) {
      for (const each of entries) each.node = article(each);
      container.replaceChildren(...entries.map((each) => each.node));
      return;
    }
    const focused = entry.node.contains(document.activeElement)
      ? document.activeElement.dataset.focus
      : null;
    const before = entry.node;
    entry.node = article(entry);
    before.replaceWith(entry.node);
    if (focused) (entry.node.querySelector(`[data-focus="${focused}"]`) ?? entry.node).focus();
  }

  function article(entry) {
    const body = { waiting: waitingBody, answered: answeredBody, refused: refusedBody }[
      entry.state
    ];
    const picture = entry.url
      ? html("img", {
          src: entry.url,
          alt: "",
          class: "thumbnail",
          error: (event) => event.target.replaceWith(html("span", { class: "thumbnail" })),
        })
      : null;
    return html(
      "article",
      { class: `card answer ${entry.state}`, tabindex: "-1", "aria-label": entry.item.name },
      html(
        "div",
        { class: "answer-head" },
        picture,
        html("div", {}, html("p", { class: "soft small name" }, entry.item.name), body(entry)),
      ),
      entry.state === "answered" ? details(entry) : null,
    );
  }

  const waitingBody = () => html("p", { class: "soft" }, t("answer.waiting"));

  const refusedBody = ({ refused }) =>
    html(
      "div",
      { class: "problem" },
      html("p", {}, problem(refused)),
      html(
        "p",
        { class: "small" },
        [refused.code, refused.field, refused.requestId].filter(Boolean).join(" · "),
      ),
    );

  function answeredBody({ answer }) {
    if (answer.value !== undefined) {
      const { interval } = answer;
      const said = interval
        ? covered(["answer.interval", "answer.interval_unmeasured"], {
            low: number(interval[0]),
            high: number(interval[1]),
          })
        : html("p", {}, t("answer.no_interval"));
      return html("div", {}, html("p", { class: "headline" }, number(answer.value, 6)), said);
    }
    const set = answer.prediction_set;
    const labels = set.slice(0, MOST_BARS).join(", ") + (set.length > MOST_BARS ? ", …" : "");
    return html(
      "div",
      {},
      html(
        "p",
        { class: "headline" },
        named(answer),
        " ",
        answer.labels
          ? null
          : html("span", { class: "soft" }, percent(answer.probabilities[answer.label])),
      ),
      covered(["answer.set", "answer.set_unmeasured"], { labels }),
      answer.expected_cost === undefined
        ? null
        : html("p", {}, t("answer.cost", { cost: number(answer.expected_cost) })),
    );
  }

  /** The measured coverage of sets or intervals, and its caveats. */
  function covered([measured, unmeasured], values) {
    const coverage = facts().card?.coverage;
    const said = {
      ...values,
      measured: percent(coverage?.measured?.value, 0),
      target: percent(coverage?.target),
    };
    return html(
      "div",
      {},
      html("p", {}, t(coverage?.measured ? measured : unmeasured, said)),
      coverage ? coverageDoubts(coverage) : null,
    );
  }

  function details(entry) {
    const { answer } = entry;
    return html(
      "div",
      {},
      answer.is_ood
        ? html(
            "p",
            { class: "notice" },
            t(ofKind(entry, ["answer.ood_picture", "answer.ood_text", "answer.ood_row"])),
          )
        : null,
      answer.truncated ? html("p", { class: "notice" }, t("answer.truncated")) : null,
      answer.abstain ? html("p", { class: "notice" }, t("answer.abstain")) : null,
      answer.probabilities ? probabilities(answer) : null,
      explanationOf(entry),
      feedbackOf(entry),
      html(
        "p",
        { class: "soft small facts" },
        [
          `${t("answer.model")} ${answer.model_version}`,
          `${t("answer.request")} ${answer.request_id}`,
          t("answer.took", { time: milliseconds(entry.took) }),
          `${t("answer.score")} ${number(answer.ood_score, 3)}`,
        ].map((fact) => html("span", {}, fact)),
      ),
    );
  }

  function probabilities({ probabilities: all, label: one, labels }) {
    const { labels: names, calibration } = facts().card ?? {};
    const threshold = (label) => calibration?.thresholds?.[names.indexOf(label)] ?? null;
    const sorted = Object.entries(all).sort((one, other) => other[1] - one[1]);
    const rows = sorted
      .slice(0, MOST_BARS)
      .map(([label, share]) =>
        html(
          "tr",
          {},
          html("th", { scope: "row" }, label),
          html(
            "td",
            { class: "wide" },
            bar(
              share,
              (labels ?? [one]).includes(label) ? "first" : "",
              threshold(label),
            ),
          ),
          html("td", { class: "number" }, percent(share)),
        ),
      );
    const more = sorted.length - rows.length;
    return html(
      "div",
      {},
      html(
        "table",
        { class: "bars", "aria-label": t("answer.probabilities") },
        html("tbody", {}, rows),
      ),
      more > 0 ? html("p", { class: "soft small" }, t("answer.more", { count: more })) : null,
    );
  }

  function explanationOf(entry) {
    if (entry.explanation)
      return { occlusion: places, columns, words }[entry.explanation.kind](entry);
    if (entry.explaining)
      return html(
        "p",
        { class: "soft", "data-focus": "explain", tabindex: "-1" },
        t("explain.waiting"),
      );
    return html(
      "div",
      {},
      entry.explainProblem
        ? html("p", { class: "problem", role: "alert" }, whyUnexplained(entry.explainProblem))
        : null,
      html(
        "button",
        { type: "button", "data-focus": "explain", click: () => explainEntry(entry) },
        t(ofKind(entry, ["explain.picture", "explain.text", "explain.row"])),
      ),
    );
  }

  function places({ explanation }) {
    const changes = explanation.changes.flat();
    const strongest = changes.reduce(
      (one, other) => (Math.abs(other) > Math.abs(one) ? other : one),
      0,
    );
    const isValue = givesValue();
    const show = (value) => (isValue ? number(value) : percent(value));
    const says =
      !isValue && Math.abs(strongest) < HARDLY
        ? t("explain.hardly", { most: show(Math.abs(strongest)) })
        : t("explain.strongest", {
            before: show(explanation.answer),
            after: show(explanation.answer - strongest),
          });
    const size = facts().card?.input?.size_px;
    return html(
      "div",
      { class: "explanation", "data-focus": "explain", tabindex: "-1" },
      html("h3", {}, t("explain.picture_title")),
      html(
        "div",
        { class: "figures" },
        figure(explanation.input_png, size ? t("explain.input", { size }) : t("explain.input_any")),
        figure(explanation.overlay_png, legend(explanation)),
      ),
      html("p", { class: "soft small" }, says),
    );
  }

  const figure = (png, caption) =>
    html(
      "figure",
      {},
      html("img", { src: `data:image/png;base64,${png}`, alt: "", class: "pixels" }),
      html("figcaption", { class: "soft small" }, caption),
    );

  const ofKind = ({ item }, [picture, text, row]) =>
    item.file ? picture : facts().card?.input.kind === "texts" ? text : row;

  const givesValue = () => !facts().card?.labels?.length;

  const legend = ({ of }) =>
    html(
      "span",
      {},
      html("span", { class: "swatch for" }),
      t("explain.for", { label: givesValue() ? t("explain.high_value") : of }),
      " ",
      html("span", { class: "swatch against" }),
      t("explain.against"),
    );

  function words({ explanation }) {
    const most = Math.max(...explanation.words.map(({ change }) => Math.abs(change)));
    const marked = ({ text, change }) => {
      if (4 * Math.abs(change) < most) return text;
      const word = text.trim();
      const [before, after] = text.split(word);
      return [before, html("mark", { class: change < 0 ? "against" : "for" }, word), after];
    };
    return html(
      "div",
      { class: "explanation", "data-focus": "explain", tabindex: "-1" },
      html("h3", {}, t("explain.text_title")),
      html("p", { class: "marked" }, explanation.words.flatMap(marked)),
      legend(explanation),
    );
  }

  function columns({ explanation, item }) {
    const isValue = givesValue();
    const show = (value) => (isValue ? number(value, 4) : percent(value));
    const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + show(Math.abs(value));
    const worth = (column) => column.contribution ?? column.change;
    const sorted = [...explanation.columns].sort(
      (one, other) => Math.abs(worth(other)) - Math.abs(worth(one)),
    );
    const shown = sorted.slice(0, MOST_COLUMNS).filter((column) => worth(column) !== 0);
    const most = Math.max(
      ...shown.map((column) => Math.abs(worth(column)) + (column.standard_error ?? 0)),
      0,
    );
    const method = {
      exact: t("explain.exact"),
      sampled: t("explain.sampled", { orders: explanation.orders }),
      changes_only: t("explain.changes_only"),
    }[explanation.method];
    return html(
      "div",
      { class: "explanation", "data-focus": "explain", tabindex: "-1" },
      html("h3", {}, t("explain.row_title")),
      shown.length ? null : html("p", {}, t("explain.typical")),
      html(
        "p",
        { class: "soft small" },
        t(isValue ? "explain.row_value" : "explain.row_label", {
          ...explanation,
          whose: t(explanation.background_rows ? "explain.rows" : "explain.usual", explanation),
          usual: show(explanation.usual_answer),
          own: show(explanation.answer),
        }),
        " ",
        method,
      ),
      html(
        "table",
        { class: "bars" },
        html(
          "tbody",
          {},
          shown.map((column) =>
            html(
              "tr",
              {},
              html(
                "th",
                { scope: "row" },
                column.name,
                html("span", { class: "soft given" }, ` ${givenText(item.row[column.name])}`),
              ),
              html(
                "td",
                { class: "wide" },
                twoSided(worth(column), most, column.standard_error ?? 0),
              ),
              html(
                "td",
                { class: "number" },
                signed(worth(column)),
                column.standard_error
                  ? html("span", { class: "soft" }, ` ± ${show(column.standard_error)}`)
                  : null,
              ),
            ),
          ),
        ),
      ),
      sorted.length > shown.length
        ? html(
            "p",
            { class: "soft small" },
            t("explain.others", { count: sorted.length - shown.length }),
          )
        : null,
    );
  }

  const givenText = (value) =>
    value === undefined || value === null
      ? t("form.missing")
      : typeof value === "boolean"
        ? t(`form.${value}`)
        : typeof value === "number"
          ? number(value)
          : value;

  function feedbackOf(entry) {
    if (!facts().takesFeedback) return null;
    if (["sent", "waiting"].includes(entry.feedback))
      return html(
        "p",
        { class: "soft", "data-focus": "feedback", tabindex: "-1" },
        t(`feedback.${entry.feedback}`),
      );
    const labels = facts().card?.labels ?? [];
    const control = truthControl(entry, labels);
    const isSending = entry.feedback === "sending";
    return html(
      "form",
      {
        class: "row feedback",
        submit: (event) => {
          event.preventDefault();
          if (entry.answer.labels)
            return sendTruth(
              entry,
              [...control.selectedOptions].map(({ value }) => value),
            );
          const truth = labels.length ? control.value : Number(control.value);
          if (control.value !== "") sendTruth(entry, truth);
        },
      },
      labels.length
        ? html(
            "button",
            {
              type: "button",
              disabled: isSending,
              "data-focus": "feedback",
              click: () => sendTruth(entry, entry.answer.labels ?? entry.answer.label),
            },
            t("feedback.right"),
          )
        : null,
      html(
        "label",
        { class: "row" },
        html("span", {}, t(labels.length ? "feedback.wrong" : "feedback.value")),
        control,
      ),
      html(
        "button",
        { type: "submit", disabled: isSending, "data-focus": "ground-truth" },
        t("feedback.send"),
      ),
      entry.feedbackProblem
        ? html("p", { class: "problem", role: "alert" }, entry.feedbackProblem)
        : null,
    );
  }

  function truthControl(entry, labels) {
    if (!labels.length) return html("input", { type: "number", step: "any", required: true });
    const given = entry.answer.labels;
    if (given)
      return html(
        "select",
        { multiple: true },
        labels.map((label) => html("option", { selected: given.includes(label) }, label)),
      );
    if (labels.length > MOST_LABELS) {
      const list = `labels-${entry.number}`;
      return html(
        "input",
        { type: "text", list, required: true },
        html(
          "datalist",
          { id: list },
          labels.slice(0, MOST_LABELS).map((label) => html("option", { value: label })),
        ),
      );
    }
    return html(
      "select",
      { required: true },
      html("option", { value: "" }, t("form.choose")),
      labels
        .filter((label) => label !== entry.answer.label)
        .map((label) => html("option", { value: label }, label)),
    );
  }

  return { ask, render: () => render(), count: () => entries.length };
}

/** An error in the user's language if it is translated, with the service's message. */
export function problem(refused) {
  const words = known(`error.${refused.code}`, "");
  return words && refused.message
    ? `${words} (${refused.message})`
    : words || refused.message || String(refused);
}

/** The reason for a missing explanation. */
function whyUnexplained({ code }) {
  return (
    known(`explain.error.${code}`, "") ||
    known(`error.${code}`, "") ||
    t("explain.error.other", { code })
  );
}

const named = ({ label, labels }) => (labels ? labels.join(", ") || t("answer.no_label") : label);

function spoken(answer) {
  if (answer.value !== undefined) return number(answer.value, 6);
  if (answer.labels) return named(answer);
  const said = `${answer.label}, ${percent(answer.probabilities[answer.label])}`;
  return answer.abstain ? `${said}. ${t("answer.abstain")}` : said;
}

/** Retries while busy. */
async function patiently(attempt) {
  for (let tries = 1; ; tries++) {
    try {
      return await attempt();
    } catch (refused) {
      if (refused.code !== "explain_busy" || tries === EXPLAIN_TRIES) throw refused;
      await new Promise((resolve) => setTimeout(resolve, 500 * tries));
    }
  }
}
