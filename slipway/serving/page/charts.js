// Small SVG charts, each with a description for screen readers.

import { html, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 72;

/**
 * Lines over `count` points in time. `series` are {name, values, kind}, the newest value last; null
 * is a gap. `format` renders a value as text.
 */
export function lines(series, count, label, format) {
  const most = Math.max(
    0,
    ...series.flatMap((line) => line.values.filter((value) => value !== null)),
  );
  const top = most || 1;
  const x = (index, length) => ((count - length + index) * WIDTH) / (count - 1);
  const y = (value) => HEIGHT - 4 - (value / top) * (HEIGHT - 12);
  const now = series.map((line) => [line, line.values.at(-1) ?? null]);
  return html(
    "figure",
    { class: "chart" },
    svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": label,
      },
      svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 4, y2: HEIGHT - 4, class: "axis" }),
      series.map((line) => svg("path", { d: path(line.values, x, y), class: `line ${line.kind}` })),
    ),
    html(
      "figcaption",
      {},
      now.map(([line, value]) =>
        html(
          "span",
          { class: `key ${line.kind}` },
          `${line.name} `,
          html("b", {}, value === null ? "–" : format(value)),
        ),
      ),
      html("span", { class: "soft" }, `max ${format(most)}`),
    ),
  );
}

function path(values, x, y) {
  let drawn = "";
  let isOpen = false;
  values.forEach((value, index) => {
    if (value !== null) {
      const place = `${x(index, values.length).toFixed(1)} ${y(value).toFixed(1)}`;
      drawn += isOpen ? `L${place}` : `M${place}h0`; // h0 draws a dot for a single value
    }
    isOpen = value !== null;
  });
  return drawn;
}

/** A bar for a fraction in [0, 1], with a line at `mark`. */
export function bar(share, kind = "", mark = null) {
  const width = Math.max(0, Math.min(1, share)) * 100;
  return svg(
    "svg",
    {
      class: "bar-chart",
      viewBox: "0 0 100 6",
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    },
    svg("rect", { width: 100, height: 6, rx: 1, class: "ground" }),
    svg("rect", { width, height: 6, rx: 1, class: `fill ${kind}` }),
    mark === null ? null : svg("rect", { x: mark * 100, width: 0.7, height: 6, class: "middle" }),
  );
}

/** A bar from the middle to one side for a value in [-most, most], with an error bar. */
export function twoSided(value, most, error = 0) {
  const scale = 48 / (most || 1);
  const end = 50 + Math.max(-most, Math.min(most, value)) * scale;
  return svg(
    "svg",
    {
      class: "bar-chart",
      viewBox: "0 0 100 6",
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    },
    svg("rect", { width: 100, height: 6, rx: 1, class: "ground" }),
    svg("rect", {
      x: Math.min(50, end),
      width: Math.abs(end - 50),
      height: 6,
      class: `fill ${value < 0 ? "against" : "for"}`,
    }),
    error
      ? svg("rect", {
          x: end - error * scale,
          width: 2 * error * scale,
          y: 2.5,
          height: 1,
          class: "error",
        })
      : null,
    svg("rect", { x: 49.8, width: 0.4, height: 6, class: "middle" }),
  );
}

/** A bar for `value` with a mark at `limit`. */
export function limited(value, limit) {
  const most = Math.max(value, limit * 1.5) || 1;
  return svg(
    "svg",
    {
      class: "bar-chart",
      viewBox: "0 0 100 6",
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    },
    svg("rect", { width: 100, height: 6, rx: 1, class: "ground" }),
    svg("rect", {
      width: (100 * value) / most,
      height: 6,
      rx: 1,
      class: `fill ${value > limit ? "over" : ""}`,
    }),
    svg("rect", { x: (100 * limit) / most - 0.4, width: 0.8, height: 6, class: "mark" }),
  );
}
