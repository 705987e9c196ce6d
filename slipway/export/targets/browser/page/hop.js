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
  let row = null;
  try {
    await slipway.session;
    const { rows, rounds } = await (await get("/hop/rows")).json();
    let values = null;
    const begin = performance.now();
    for (row = 0; row < rows; row++) {
      const bytes = new Uint8Array(await (await get(`/hop/row/${row}`)).arrayBuffer());
      const input = await slipway.inputOf(bytes);
      const { outputs, score } = await slipway.run(input);
      const numbers = new Float32Array([...outputs, score]);
      await send(`/hop/answer/${row}`, new Blob([numbers, input]));
      values = values || input;
    }
    const seconds = (performance.now() - begin) / 1000;
    row = null;
    const times = [];
    for (let round = 0; round < rounds; round++) {
      const start = performance.now();
      await slipway.run(values);
      times.push(performance.now() - start);
    }
    times.sort((one, other) => one - other);
    await send("/hop/done", JSON.stringify({
      agent: navigator.userAgent,
      latency_ms: times[times.length >> 1],
      rows_per_second: rows / seconds,
      webgpu: "gpu" in navigator && Boolean(await navigator.gpu.requestAdapter()),
    }));
  } catch (error) {
    await send("/hop/fault", JSON.stringify({ row, message: String(error.message || error) }));
  }
})();
