// The page: reads the status of the service every two seconds and renders everything from it.

import { call, keepKey, key } from "./api.js";
import { answerList, problem } from "./answers.js";
import { asking } from "./asking.js";
import { modelCard } from "./card.js";
import { find, html } from "./dom.js";
import { rowForm } from "./form.js";
import { liveView } from "./live.js";
import { listenForPictures, MOST_PICTURES, pictureInput } from "./pictures.js";
import { onLanguage, startTexts, t } from "./texts.js";

const POLL_MS = 2000;
const AT_ONCE = 4; // concurrent predictions
const page = { card: null, status: null, trouble: null, form: null, isAsking: false };

const live = liveView(find("live-content"));
const answers = answerList(find("answers"), announce, () => ({
  card: page.card,
  takesFeedback: Boolean(page.status?.feedback),
}));

function announce(text) {
  find("announcement").textContent = text;
}

async function askPictures(files) {
  if (page.card?.input.kind !== "images") return;
  const waiting = files.slice(0, MOST_PICTURES).map((file) => ({ name: file.name, file }));
  const isAlone = waiting.length === 1;
  const worker = async () => {
    for (let item = waiting.shift(); item; item = waiting.shift()) {
      await answers.ask(item, { explain: isAlone }).catch(meetRefusal);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}

async function askRow(row) {
  try {
    const name = page.card?.input.kind === "texts" ? "form.text" : "form.row";
    await answers.ask({ name: t(name, { number: answers.count() + 1 }), row }, { explain: true });
  } catch (refused) {
    page.form?.showProblem(refused);
    meetRefusal(refused);
  }
}

/** Requests a key if it is missing or wrong. Other errors are shown where they occurred. */
function meetRefusal(refused) {
  if (refused.status === 401) askForKey(refused);
}

function askForKey(refused) {
  find("key").hidden = false;
  find("key-problem").textContent = key() ? problem(refused) : "";
}

async function poll() {
  if (document.hidden || page.isAsking) return;
  page.isAsking = true;
  try {
    const { content: status } = await call("status");
    find("key").hidden = true;
    const isOther = status.model.version !== (page.card?.model_version ?? null);
    page.status = status;
    page.trouble = status.model.ready ? null : { kind: "not_ready", message: status.model.reason };
    live.take(status);
    if (status.model.ready && isOther) {
      page.card = (await call("model")).content;
      renderModel();
    }
  } catch (refused) {
    if (refused.code === "no_answer") page.trouble = { kind: "no_answer", message: "" };
    else if (refused.status === 401) {
      page.trouble = { kind: "no_key", message: "" };
      askForKey(refused);
    } else page.trouble = { kind: "trouble", message: problem(refused) };
  } finally {
    page.isAsking = false;
  }
  renderState();
}

function renderState() {
  const { trouble, card } = page;
  const state = find("state");
  state.dataset.state = trouble ? trouble.kind : card ? "ready" : "waiting";
  state.textContent = trouble
    ? t(`state.${trouble.kind}`)
    : card
      ? t("state.ready", { version: card.model_version })
      : t("state.waiting");
  const reason = find("reason");
  const text =
    trouble && trouble.kind !== "no_key"
      ? `${t(`reason.${trouble.kind}`)} ${trouble.message}`.trim()
      : "";
  if (reason.textContent !== text) reason.textContent = text; // screen readers read only changes
  reason.hidden = !text;
}

function renderModel() {
  const { card } = page;
  const written = page.form?.read();
  page.form = null;
  if (!card) find("input").replaceChildren();
  else if (card.input.kind === "images") find("input").replaceChildren(pictureInput(askPictures));
  else {
    page.form = rowForm(card.input, askRow);
    if (written) page.form.write(written);
    find("input").replaceChildren(page.form.node);
  }
  find("model-content").replaceChildren(
    card ? modelCard(card) : html("p", { class: "soft" }, t("model.waiting")),
  );
  find("ask-content").replaceChildren(asking(card?.input, Boolean(key())));
}

find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(find("key-value").value.trim() || null);
  find("key-value").value = "";
  poll();
});
document.addEventListener("visibilitychange", poll);
listenForPictures(askPictures);
onLanguage(() => {
  renderModel();
  renderState();
  answers.render();
  live.render();
});
await startTexts();
await poll();
setInterval(poll, POLL_MS);
