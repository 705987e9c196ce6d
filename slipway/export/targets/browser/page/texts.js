// From one row of texts, as JSON or from a form, to the bytes that the network takes.
"use strict";

(() => {
  const SEPARATOR = "\n";
  const TRUNCATED = 0xff;
  const CHARACTERS_PER_BYTE = 4;
  // Python's white space and the control characters. JavaScript's \s has others.
  const SPACE = new RegExp(
    "[\\0-\\x20\\x7f-\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+",
    "g",
  );
  const joined = (text) => text.replace(SPACE, " ").replace(/^ | $/g, "");
  const first = (text, most) =>
    text.length > most ? Array.from(text).slice(0, most).join("") : text;

  // A browser knows characters that the training did not, and would compose them.
  const splitters = new Map();
  function splitterOf(contract) {
    if (!splitters.has(contract)) {
      const escaped = (code) => `\\u{${code.toString(16)}}`;
      const ranges = contract.unassigned.map(([low, high]) => `${escaped(low)}-${escaped(high)}`);
      splitters.set(contract, new RegExp(`([${ranges.join("")}])`, "u"));
    }
    return splitters.get(contract);
  }

  function composed(text, contract) {
    return text.split(splitterOf(contract)).map((part, place) => {
      if (place % 2) return part;
      const unknown = /\p{Unassigned}/u.exec(part);
      if (unknown) {
        throw new Error(
          `this browser does not know the character '${unknown[0]}' of the text; expected a ` +
            "newer browser. Open the page there.",
        );
      }
      return part.normalize("NFC");
    }).join("");
  }

  function seen(cell, contract) {
    const most = CHARACTERS_PER_BYTE * contract.max_bytes;
    let text = joined(cell);
    if (/[^\0-\x7f]/.test(text)) {
      text = composed(first(text, most).replace(/\p{Surrogate}/gu, "\ufffd"), contract);
    }
    return first(text, most);
  }

  // (max_bytes,) uint8, padded with zeros; the last byte marks a text that was cut.
  function bytesOf(text, size) {
    const row = new Uint8Array(size);
    const encoded = new TextEncoder().encode(text);
    let end = encoded.length;
    if (end > size) {
      end = size - 1;
      while (end && (encoded[end] & 0xc0) === 0x80) end--; // only whole characters
      row[size - 1] = TRUNCATED;
    }
    row.set(encoded.subarray(0, end));
    return row;
  }

  function fromRow(row, contract) {
    const { columns, ignored, max_characters: most } = contract;
    const known = [...columns, ...ignored];
    for (const name of Object.keys(row)) {
      if (!known.includes(name)) {
        throw new Error(
          `there is no column '${name}'; expected ${known.join(", ")}. Leave it out.`,
        );
      }
    }
    const cells = columns.map((name) => row[name] || "");
    const other = cells.findIndex((cell) => typeof cell !== "string");
    if (other >= 0) {
      throw new Error(
        `${columns[other]}: found ${JSON.stringify(cells[other]).slice(0, 80)}; expected text. ` +
          "Correct it.",
      );
    }
    if (!cells.some(joined)) {
      throw new Error(
        `${columns[0]}: the text is missing or blank; expected a visible character. Write one.`,
      );
    }
    const length = cells.reduce((sum, cell) => sum + Array.from(cell).length, 0);
    if (most !== null && length > most) {
      throw new Error(
        `${columns[0]}: found ${length} characters; expected at most ${most}. Shorten the text.`,
      );
    }
    const text = cells.map((cell) => seen(cell, contract)).join(SEPARATOR);
    return bytesOf(text, contract.max_bytes);
  }

  slipway.texts = { fromRow, fromTexts: fromRow };
})();
