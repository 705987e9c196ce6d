// The page: a drop zone, a camera or a form, and the answer with its probabilities.
"use strict";

(() => {
  const { model } = slipway;
  const byId = (id) => document.getElementById(id);
  const MOST_SHOWN = 10;

  function element(tag, text, properties = {}) {
    const made = Object.assign(document.createElement(tag), properties);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function say(text, state) {
    byId("state").textContent = text;
    byId("state").dataset.state = state;
  }

  // Names the runtime that answers; for WebAssembly in place of WebGPU, with the reason.
  function sayRuntime({ used, adapter, reason }) {
    const name = used === "webgpu" ? `WebGPU (${adapter})` : "WebAssembly";
    byId("runtime").textContent = `Answers by ${name}${reason && `, because ${reason}`}.`;
    byId("runtime").dataset.used = used;
  }

  const shown = (number) => Number(number.toPrecision(6)).toString();

  function show(answer, milliseconds) {
    const parts = [];
    if (answer.value !== undefined) {
      const { interval } = answer;
      const percent = Math.round(100 * model.calibration.conformal.coverage);
      parts.push(element("p", shown(answer.value), { className: "label" }));
      if (interval) {
        parts.push(element("p", `${percent} % interval: ${interval.map(shown).join(" to ")}`));
      }
    } else {
      parts.push(element("p", answer.given.join(", ") || "no label", { className: "label" }));
      const bars = element("dl", undefined, { className: "bars" });
      const { probabilities } = answer;
      const order = probabilities.map((_, place) => place)
        .sort((one, other) => probabilities[other] - probabilities[one]).slice(0, MOST_SHOWN);
      for (const place of order) {
        const probability = probabilities[place];
        const bar = element("meter", undefined, { min: 0, max: 1, value: probability });
        const value = element("dd");
        value.append(bar, element("span", `${(100 * probability).toFixed(1)} %`));
        bars.append(element("dt", model.labels[place]), value);
      }
      parts.push(bars, element("p", `Prediction set: ${answer.set.join(", ")}`));
    }
    if (answer.isOod) {
      parts.push(element("p", "Unlike the training data: do not rely on this answer.",
        { className: "warning" }));
    }
    byId("answer").replaceChildren(...parts);
    byId("answer").hidden = false;
    say(`Answered in ${milliseconds.toFixed(0)} ms, in this browser.`, "ready");
  }

  async function predict(makeInput) {
    say("Computing ...", "busy");
    try {
      const begin = performance.now();
      const found = await slipway.run(await makeInput());
      show(slipway.answerOf(found), performance.now() - begin);
      sayRuntime(await slipway.session);
    } catch (error) {
      byId("answer").hidden = true;
      say(error.message, "failed");
    }
  }

  async function predictFile(file) {
    const preview = byId("preview");
    URL.revokeObjectURL(preview.src);
    preview.src = URL.createObjectURL(file);
    preview.hidden = false;
    const bytes = new Uint8Array(await file.arrayBuffer());
    await predict(() => slipway.inputOf(bytes));
  }

  function listenForImages() {
    const zone = byId("drop");
    byId("file").addEventListener("change", ({ target }) => {
      if (target.files.length) predictFile(target.files[0]);
    });
    zone.addEventListener("dragover", (event) => {
      event.preventDefault();
      zone.classList.add("over");
    });
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      zone.classList.remove("over");
      if (event.dataTransfer.files.length) predictFile(event.dataTransfer.files[0]);
    });
    const video = byId("video");
    byId("camera").addEventListener("click", async () => {
      try {
        if (!video.srcObject) {
          if (!navigator.mediaDevices) {
            throw new Error("only pages over HTTPS, of localhost or from files get one");
          }
          const media = { video: { facingMode: "environment" } };
          video.srcObject = await navigator.mediaDevices.getUserMedia(media);
          await video.play();
          byId("camera-box").hidden = false;
        }
      } catch (error) {
        // Else the next press of the button would find a stream, and do nothing.
        video.srcObject?.getTracks().forEach((track) => track.stop());
        video.srcObject = null;
        say(`the camera cannot be used (${error.message}); expected a camera that this page may ` +
          "use. Allow it in the browser, or choose a file.", "failed");
      }
    });
    byId("snap").addEventListener("click", () => {
      predict(async () => slipway.images.fromFrame(video, model.contract));
    });
  }

  function listenForRows() {
    const form = byId("row");
    const isTexts = model.contract.kind === "texts";
    const columns = isTexts
      ? model.contract.columns.map((name) => ({ name, kind: "text" }))
      : model.contract.columns;
    for (const column of columns) {
      const label = element("label", `${column.name} (${column.kind})`);
      const tag = isTexts ? "textarea" : "input";
      const input = element(tag, undefined, { name: column.name, autocomplete: "off" });
      input.value = model.example[column.name] ?? "";
      label.append(input);
      byId("cells").append(label);
    }
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const cells = Object.fromEntries(new FormData(form));
      const reader = isTexts ? slipway.texts : slipway.columns;
      predict(async () => reader.fromTexts(cells, model.contract));
    });
  }

  function showPapers() {
    byId("card").textContent = model.card || "The bundle has no model card.";
    const { certificate } = slipway;
    if (!certificate) return;
    byId("verdict").textContent = certificate.verdict;
    byId("verdict").dataset.certified = certificate.certified;
    for (const hop of certificate.hops) {
      const line = element("tr");
      const difference = hop.max_difference === null ? "" : hop.max_difference.toExponential(1);
      const status = hop.status.replace("_", " ");
      const latency = hop.latency_ms?.toFixed(2) ?? "";
      for (const cell of [hop.name, status, hop.rows || "", difference, latency]) {
        line.append(element("td", cell));
      }
      byId("hops").append(line);
    }
  }

  const kind = model.contract.kind;
  byId("images").hidden = kind !== "images";
  byId("row").hidden = kind === "images";
  byId("title").textContent = `Model ${model.version}`;
  document.title = `Model ${model.version}`;
  showPapers();
  if (kind === "images") listenForImages();
  else listenForRows();
  slipway.session.then(
    (opened) => {
      sayRuntime(opened);
      say("Ready. Nothing that you choose here leaves this device.", "ready");
    },
    (error) => say(error.message, "failed"),
  );
})();
