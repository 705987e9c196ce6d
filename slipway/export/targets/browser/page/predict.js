// The sessions of ONNX Runtime, and the answers to one row. Needs model.js, runtime.js,
// runtime_wasm.js and certificate.js before it, and images.js, columns.js or texts.js for inputs.
"use strict";

(() => {
  // A module of one function that uses a 128-bit vector: valid only with WASM SIMD.
  const SIMD = [
    0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253,
    15, 253, 98, 11,
  ];

  function bytesOf(base64) {
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
    return bytes;
  }

  async function open() {
    if (typeof WebAssembly !== "object" || !WebAssembly.validate(new Uint8Array(SIMD))) {
      throw new Error(
        "this browser has no WebAssembly SIMD; expected Chrome 91, Firefox 89 or Safari 16.4, or " +
          "a newer one. Open the page there.",
      );
    }
    if (typeof DecompressionStream !== "function") {
      throw new Error(
        "this browser has no DecompressionStream; expected Chrome 80, Firefox 113 or Safari " +
          "16.4, or a newer one. Open the page there.",
      );
    }
    ort.env.wasm.numThreads = 1; // more need headers that a static host may not send
    ort.env.wasm.wasmBinary = bytesOf(slipway.runtimeWasm).buffer;
    const opened = { wasm: await create("wasm"), used: "wasm", reason: "" };
    if (slipway.model.webgpu) await addWebgpu(opened);
    slipway.runtimeWasm = slipway.model.onnx = null; // their text is no longer needed
    return opened;
  }

  const create = (provider) =>
    ort.InferenceSession.create(bytesOf(slipway.model.onnx), { executionProviders: [provider] });

  // Let WebGPU answer, or say in `reason` why WebAssembly does. Only what the hop certified is
  // tried. A fault of WebGPU, as opposed to its absence, is in `fault` as well.
  async function addWebgpu(opened) {
    const hop = slipway.certificate?.webgpu ?? { reason: "no hop certifies WebGPU" };
    opened.reason = hop.reason || (await whyNoAdapter());
    if (opened.reason) return;
    const stop = (problem) => {
      opened.used = "wasm";
      opened.reason = opened.fault = problem;
    };
    try {
      opened.webgpu = await create("webgpu");
      const device = await ort.env.webgpu.device;
      const { vendor, architecture, description } = device.adapterInfo;
      opened.adapter = [vendor, architecture, description].filter(Boolean).join(" ") || "unnamed";
      await compareRuntimes(opened, hop);
      opened.used = "webgpu";
      device.lost.then(({ message }) => stop(`WebGPU was lost: ${message}`));
    } catch (error) {
      stop(error.message);
    }
  }

  async function whyNoAdapter() {
    if (!isSecureContext) return "browsers have WebGPU only over HTTPS, of localhost or from files";
    if (!navigator.gpu) return "this browser has no WebGPU";
    try {
      return (await navigator.gpu.requestAdapter()) ? "" : "this browser has no WebGPU adapter";
    } catch (error) {
      return `this browser gives no WebGPU adapter (${error.message})`;
    }
  }

  // Throw unless both runtimes answer synthetic rows alike: another GPU than that of the hop rounds
  // elsewhere, and its driver may be wrong.
  async function compareRuntimes(opened, { rows, max_difference: allowed }) {
    const { contract } = slipway.model;
    for (const row of rows) {
      const values = typed(contract, bytesOf(row).buffer);
      const [expected, found] = await Promise.all(
        [opened.wasm, opened.webgpu].map((session) => runIn(session, values)),
      );
      for (const [place, value] of [...expected.outputs, expected.score].entries()) {
        const other = [...found.outputs, found.score][place];
        const distance = Math.abs(value - other) / Math.max(1, Math.abs(value));
        if (!(distance <= allowed)) {
          throw new Error(
            `WebGPU of this device differs from WebAssembly by ${distance.toExponential(1)}, ` +
              `expected at most ${allowed}`,
          );
        }
      }
    }
  }

  const typed = ({ kind, tokenizer }, buffer) => {
    if (kind === "images" || (kind === "texts" && !tokenizer)) return new Uint8Array(buffer);
    return kind === "texts" ? new Int32Array(buffer) : new Float32Array(buffer);
  };

  function tensorOf(values, contract) {
    if (contract.kind === "images") {
      const shape = [1, contract.size_px, contract.size_px, contract.channels];
      return new ort.Tensor("uint8", values, shape);
    }
    if (contract.kind !== "texts") return new ort.Tensor("float32", values, [1, values.length]);
    if (!contract.tokenizer) return new ort.Tensor("uint8", values, [1, values.length]);
    const length = Math.max(slipway.model.min_length, values.findLastIndex((id) => id) + 1);
    return new ort.Tensor("int32", values.subarray(0, length), [1, length]);
  }

  // The outputs (Float32Array) and the OOD score of one row. A WebGPU that fails is not used again.
  async function run(values) {
    const opened = await slipway.session;
    if (opened.used === "webgpu") {
      try {
        return await runIn(opened.webgpu, values);
      } catch (error) {
        opened.used = "wasm";
        opened.reason = `WebGPU failed: ${error.message}`;
      }
    }
    return runIn(opened.wasm, values);
  }

  let last = Promise.resolve(); // the runtime with WebGPU runs one row at a time

  function runIn(session, values) {
    const { contract, input_name: name, output_name: output, score_name: score } = slipway.model;
    const next = last.then(async () => {
      const found = await session.run({ [name]: tensorOf(values, contract) });
      return { outputs: found[output].data, score: found[score].data[0] };
    });
    last = next.catch(() => {});
    return next;
  }

  // The values that the network takes, from the bytes of an image or of a row as JSON.
  async function inputOf(bytes) {
    const { contract } = slipway.model;
    if (contract.kind === "images") return slipway.images.fromBytes(bytes, contract);
    const reader = contract.kind === "texts" ? slipway.texts : slipway.columns;
    return reader.fromRow(JSON.parse(new TextDecoder().decode(bytes)), contract);
  }

  // The answer in the words of the service: label or labels, set, interval, and the OOD flag.
  function answerOf({ outputs, score }) {
    const { labels, calibration } = slipway.model;
    const { thresholds, conformal, ood, decision } = calibration;
    const isOod = ood.threshold !== null && score > ood.threshold;
    if (!labels.length) {
      const [value, half] = [outputs[0], conformal.threshold];
      return { value, interval: half === null ? null : [value - half, value + half], isOod };
    }
    const probabilities = Array.from(outputs);
    const reaches = (place) => probabilities[place] >= Math.fround(thresholds[place]);
    let given = [probabilities.indexOf(Math.max(...probabilities))];
    if (thresholds && decision) given = [reaches(decision.place) ? decision.place
      : 1 - decision.place];
    else if (thresholds) given = probabilities.map((_, place) => place).filter(reaches);
    const least = Math.min(Math.fround(conformal.threshold || 0), Math.max(...probabilities));
    const set = labels
      .map((_, place) => place)
      .filter((place) => probabilities[place] >= least || given.includes(place))
      .sort((one, other) => probabilities[other] - probabilities[one]) // the most probable first
      .map((place) => labels[place]);
    return { given: given.map((place) => labels[place]), probabilities, set, isOod };
  }

  slipway.session = open();
  slipway.session.catch(() => {}); // the page shows it
  Object.assign(slipway, { run, runIn, inputOf, answerOf });
})();
