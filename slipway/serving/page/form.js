// A form for the columns of a table, or for texts. The service validates the cells.

import { html } from "./dom.js";
import { number, t } from "./texts.js";

const MOST_OPTIONS = 200; // longer lists become text fields with proposals

/**
 * A form for one row of `input` ({columns, example}). `onRow` receives the row, and
 * `showProblem(refused)` marks the refused field.
 */
export function rowForm(input, onRow) {
  const isText = input.kind === "texts";
  const fields = input.columns.map((column, index) =>
    field(column, input.example[column.name], `cell-${index}`),
  );
  const set = (row) => fields.forEach((each) => each.write(row[each.column.name]));
  const problem = html("p", { class: "problem", role: "alert" });
  const form = html(
    "form",
    {
      class: "card form",
      novalidate: true,
      submit: (event) => {
        event.preventDefault();
        showProblem(null);
        onRow(
          Object.fromEntries(
            fields
              .map((each) => [each.column.name, each.read()])
              .filter(([, value]) => value !== null),
          ),
        );
      },
    },
    html("p", { class: "soft" }, t(isText ? "form.text_hint" : "form.hint")),
    html(
      "div",
      { class: "fields" },
      fields.map((each) => each.node),
    ),
    problem,
    html(
      "div",
      { class: "row" },
      html("button", { type: "submit", class: "primary" }, t("form.send")),
      html(
        "button",
        { type: "button", click: () => set(input.example) },
        t(isText ? "form.text_example" : "form.example"),
      ),
      html("button", { type: "button", click: () => set({}) }, t("form.clear")),
    ),
  );

  function showProblem(refused) {
    problem.textContent = refused ? refused.message : "";
    for (const each of fields) {
      const isWrong = refused !== null && each.column.name === refused.field;
      each.control.toggleAttribute("aria-invalid", isWrong);
      if (isWrong) each.control.focus();
    }
  }

  return {
    node: form,
    showProblem,
    read: () => Object.fromEntries(fields.map((each) => [each.column.name, each.read()])),
    write: set,
  };
}

function field(column, example, id) {
  const { control, read, write, extra } = CONTROLS[column.kind](column, id);
  write(example);
  const bounds = column.kind === "number" ? boundsOf(column) : "";
  return {
    column,
    control,
    read,
    write: (value) => write(value ?? null),
    node: html(
      "div",
      { class: "field" },
      html(
        "label",
        { for: id },
        html("span", { class: "name" }, column.name, column.unit && ` (${column.unit})`),
        column.required
          ? html("span", { class: "required", title: t("form.required") }, " *")
          : null,
      ),
      control,
      extra,
      bounds ? html("span", { class: "soft small" }, bounds) : null,
    ),
  };
}

function boundsOf({ min, max }) {
  if (min !== null && max !== null)
    return t("form.between", { min: number(min), max: number(max) });
  if (min !== null) return t("form.from", { min: number(min) });
  return max !== null ? t("form.to", { max: number(max) }) : "";
}

const CONTROLS = {
  number(column, id) {
    // Not type="number": it drops invalid text, which the service could not report then.
    const control = html("input", {
      id,
      type: "text",
      inputmode: "decimal",
      autocomplete: "off",
      required: column.required,
    });
    const read = () => {
      const text = control.value.trim();
      if (!text) return null;
      const value = Number(text);
      return Number.isFinite(value) ? value : text;
    };
    return { control, read, write: (value) => (control.value = value ?? "") };
  },
  category(column, id) {
    const isOpen = column.other_categories === "missing" || column.categories.length > MOST_OPTIONS;
    if (isOpen) {
      const list = `${id}-list`;
      const control = html("input", {
        id,
        type: "text",
        list,
        autocomplete: "off",
        required: column.required,
      });
      const options = column.categories
        .slice(0, MOST_OPTIONS)
        .map((category) => html("option", { value: category }));
      return {
        control,
        extra: html("datalist", { id: list }, options),
        read: () => control.value || null,
        write: (value) => (control.value = value ?? ""),
      };
    }
    return choice(
      column,
      id,
      column.categories.map((category) => [category, category]),
    );
  },
  text(column, id) {
    const control = html("textarea", { id, rows: 5, required: column.required });
    const write = (value) => (control.value = value ?? "");
    return { control, read: () => control.value || null, write };
  },
  boolean(column, id) {
    return choice(column, id, [
      [true, t("form.true")],
      [false, t("form.false")],
    ]);
  },
  date(column, id) {
    const hasTimes = column.has_times;
    const control = html("input", {
      id,
      type: hasTimes ? "datetime-local" : "date",
      step: hasTimes ? 1 : null, // seconds
      required: column.required,
    });
    const write = (value) => {
      const text = (value ?? "").slice(0, hasTimes ? 19 : 10);
      control.value = hasTimes && text.length === 10 ? `${text}T00:00` : text;
    };
    return { control, read: () => control.value || null, write };
  },
};

function choice(column, id, options) {
  const values = [null, ...options.map(([value]) => value)];
  const control = html(
    "select",
    { id, required: column.required },
    html("option", {}, column.required ? t("form.choose") : t("form.missing")),
    options.map(([, text]) => html("option", {}, text)),
  );
  return {
    control,
    read: () => values[control.selectedIndex],
    write: (value) => (control.selectedIndex = Math.max(0, values.indexOf(value))),
  };
}
