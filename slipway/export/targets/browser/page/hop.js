// The hop `browser`: answers every test row with the page's own code, and sends the answers back.
// Only the server of the hop has this file; no exported folder does.
"use strict";

(async () => {
  const get = async (path) => {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer;
  };
  const send = (path, body) => fetch(path, { method: "POST", body });
  let [row, hop] = [null, "browser"];
  try {
    const opened = await slipway.session;
    const { rows, rounds } = await (await get("/hop/rows")).json();
    if (opened.fault) {
      hop = "browser/webgpu";
      throw new Error(opened.fault);
    }
    const runtimes = opened.used === "webgpu" ? ["wasm", "webgpu"] : ["wasm"];
    const seconds = { wasm: 0, webgpu: 0 };
    const timed = async (runtime, values) => {
      hop = runtime === "wasm" ? "browser" : "browser/webgpu";
      const begin = performance.now();
      const found = await slipway.runIn(opened[runtime], values);
      seconds[runtime] += (performance.now() - begin) / 1000;
      return found;
    };
    let first = null;
    for (row = 0; row < rows; row++) {
      const bytes = new Uint8Array(await (await get(`/hop/row/${row}`)).arrayBuffer());
      const begin = performance.now();
      const input = await slipway.inputOf(bytes);
      for (const runtime of runtimes) seconds[runtime] += (performance.now() - begin) / 1000;
      const numbers = [];
      for (const runtime of runtimes) {
        const { outputs, score } = await timed(runtime, input);
        numbers.push(...outputs, score);
      }
      await send(`/hop/answer/${row}`, new Blob([new Float32Array(numbers), input]));
      first = first || input;
    }
    const speed = {};
    for (const runtime of runtimes) {
      const rowsPerSecond = rows / seconds[runtime];
      const times = [];
      for (let round = 0; round < rounds; round++) {
        const begin = performance.now();
        await timed(runtime, first);
        times.push(performance.now() - begin);
        if (times.at(-1) > 1000) await get("/hop/rows"); // a sign of life
      }
      times.sort((one, other) => one - other);
      speed[runtime] = { latency_ms: times[rounds >> 1], rows_per_second: rowsPerSecond };
    }
    let webgpu = null;
    if (speed.webgpu) webgpu = { adapter: opened.adapter, ...speed.webgpu };
    else if (slipway.model.webgpu) webgpu = { reason: opened.reason };
    await send("/hop/done", JSON.stringify({
      agent: navigator.userAgent, ...speed.wasm, webgpu,
    }));
  } catch (error) {
    await send("/hop/fault", JSON.stringify({ row, hop, message: String(error.message || error) }));
  }
})();
