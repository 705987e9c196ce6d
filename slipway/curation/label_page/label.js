"use strict";

const DIGITS = "1234567890";
const place = (id) => document.getElementById(id);
let state = null;
let chosen = new Set(); // of several labels
let isBusy = false;

/** Make an element; texts of rows are only ever set as text. */
function element(name, text = "", properties = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, properties);
}

async function ask(path, content) {
  if (isBusy) return;
  isBusy = true;
  try {
    const request =
      content === undefined
        ? {}
        : {
            method: "POST",
            headers: { "content-type": "application/json" },
            body: JSON.stringify(content),
          };
    const response = await fetch(path, request);
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    state = answer;
    chosen = new Set();
    show();
    say("");
  } catch (error) {
    say(error.message);
  } finally {
    isBusy = false;
  }
}

function say(text) {
  place("error").textContent = text;
  place("error").hidden = !text;
}

function give(truth) {
  if (state?.row) ask("answer", { ...named(), ground_truth: truth });
}

function named() {
  return { request_id: state.row.request_id, item: state.row.item };
}

function show() {
  const { row, left, labeller } = state;
  place("about").textContent = `${left} left, labels by ${labeller}`;
  place("row").replaceChildren(row ? shown(row) : element("p", "No row is waiting. Thank you."));
  place("labels").replaceChildren(...(row ? answers() : []));
  place("skip").disabled = !row;
  place("conflicts").hidden = !state.conflicts.length;
  place("conflicts").querySelector("ul").replaceChildren(
    ...state.conflicts.map((one) => {
      const opinions = Object.entries(one.opinions).map(([who, label]) => `${who}: ${label}`);
      return element("li", `${one.request_id}, item ${one.item}: ${opinions.join("; ")}`);
    }),
  );
  place("labels").querySelector("input")?.focus();
}

function shown(row) {
  if (row.cells === null) {
    const query = new URLSearchParams(named());
    return element("img", "", { src: `picture?${query}`, alt: "the row to label" });
  }
  const list = element("dl");
  for (const [name, cell] of Object.entries(row.cells)) {
    list.append(element("dt", name), element("dd", cell === null ? "(empty)" : String(cell)));
  }
  return list;
}

function answers() {
  if (state.kind === "value") {
    const field = element("input", "", { type: "number", step: "any", ariaLabel: "value" });
    return [field, button("Enter", "Save", finish)];
  }
  const labels = state.labels.map((label, number) =>
    button(DIGITS[number] ?? "", label, (made) => pick(label, made)),
  );
  const isSeveral = state.kind === "label_probabilities";
  if (isSeveral) for (const one of labels) one.ariaPressed = "false";
  return isSeveral ? [...labels, button("Enter", "Save", finish)] : labels;
}

function button(key, text, press) {
  const made = element("button", "", { type: "button" });
  if (key) made.append(element("kbd", key));
  made.append(text);
  made.addEventListener("click", () => press(made));
  return made;
}

function pick(label, made) {
  if (state.kind !== "label_probabilities") return give(label);
  if (!chosen.delete(label)) chosen.add(label);
  made.ariaPressed = String(chosen.has(label));
}

function finish() {
  if (state.kind === "label_probabilities") return give([...chosen]);
  const text = place("labels").querySelector("input").value;
  if (text === "") return say("Enter a number, or skip the row.");
  give(Number(text));
}

place("skip").addEventListener("click", () => give(null));
place("undo").addEventListener("click", () => ask("undo", {}));
document.addEventListener("keydown", (event) => {
  if (!state || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const number = DIGITS.indexOf(event.key);
  if (event.key === "s") give(null);
  else if (event.key === "u") ask("undo", {});
  else if (event.key === "Enter" && state.row && event.target.tagName !== "BUTTON") {
    if (state.kind !== "probabilities") finish();
  } else if (state.row && state.kind !== "value" && number >= 0) {
    place("labels").children[number]?.click();
    return;
  } else return;
  event.preventDefault();
});
ask("next");
