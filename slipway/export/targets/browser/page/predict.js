// The session of ONNX Runtime, and the answers to one row. Needs model.js, runtime.js and
// runtime_wasm.js before it, and images.js, columns.js or texts.js for the input.
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
    const session = await ort.InferenceSession.create(bytesOf(slipway.model.onnx), {
      executionProviders: ["wasm"],
    });
    slipway.runtimeWasm = slipway.model.onnx = null; // their text is no longer needed
    return session;
  }

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

  // The outputs (Float32Array) and the OOD score of one row.
  async function run(values) {
    const session = await slipway.session;
    const { contract, input_name: name, output_name: output, score_name: score } = slipway.model;
    const found = await session.run({ [name]: tensorOf(values, contract) });
    return { outputs: found[output].data, score: found[score].data[0] };
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
    const shares = Array.from(outputs);
    const reaches = (place) => shares[place] >= Math.fround(thresholds[place]);
    let given = [shares.indexOf(Math.max(...shares))];
    if (thresholds && decision) given = [reaches(decision.place) ? decision.place
      : 1 - decision.place];
    else if (thresholds) given = shares.map((_, place) => place).filter(reaches);
    const least = Math.min(Math.fround(conformal.threshold || 0), Math.max(...shares));
    const set = labels
      .map((_, place) => place)
      .filter((place) => shares[place] >= least || given.includes(place))
      .sort((one, other) => shares[other] - shares[one]) // the most probable first
      .map((place) => labels[place]);
    return { given: given.map((place) => labels[place]), shares, set, isOod };
  }

  slipway.session = open();
  slipway.session.catch(() => {}); // the page shows it
  Object.assign(slipway, { run, inputOf, answerOf });
})();
