// From one row of texts, as JSON or from a form, to the bytes or tokens that the network takes.
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

  function classOf(ranges) {
    const escaped = (code) => `\\u{${code.toString(16)}}`;
    return ranges.map(([low, high]) => `${escaped(low)}-${escaped(high)}`).join("");
  }

  // A browser knows characters that the training did not, and would compose them.
  const splitters = new Map();
  function splitterOf(contract) {
    if (!splitters.has(contract)) {
      splitters.set(contract, new RegExp(`([${classOf(contract.unassigned)}])`, "u"));
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

  // The bytes of the whole characters in the first `end` bytes.
  function wholeCharacters(encoded, end) {
    while (end && (encoded[end] & 0xc0) === 0x80) end--;
    return end;
  }

  // (max_bytes,) uint8, padded with zeros; the last byte marks a text that was cut.
  function bytesOf(text, size) {
    const row = new Uint8Array(size);
    const encoded = new TextEncoder().encode(text);
    let end = encoded.length;
    if (end > size) {
      end = wholeCharacters(encoded, size - 1);
      row[size - 1] = TRUNCATED;
    }
    row.set(encoded.subarray(0, end));
    return row;
  }

  // A ByteLevel BPE: pieces of a text, their bytes as printable characters, and joined pairs.
  const tokenizers = new Map();
  function tokenizerOf(contract) {
    if (!tokenizers.has(contract)) {
      const { vocab, merges } = JSON.parse(contract.tokenizer).model;
      const [letters, numbers] = [classOf(contract.letters), classOf(contract.numbers)];
      const pieces = `'(?:[stmd]|re|ve|ll)| ?[${letters}]+| ?[${numbers}]+|` +
        ` ?[^ \\n${letters}${numbers}]+|[ \\n]+(?![^ \\n])|[ \\n]+`;
      const ranks = new Map(merges.map((pair, rank) => [pair.join("\n"), rank]));
      tokenizers.set(contract, { vocab: new Map(Object.entries(vocab)), ranks, known: new Map(),
        pieces: new RegExp(pieces, "gu") });
    }
    return tokenizers.get(contract);
  }

  // The 256 bytes as characters, as GPT-2 shows them: those that do not print come last.
  const SHOWN = (() => {
    const shown = [];
    let next = 256;
    for (let byte = 0; byte < 256; byte++) {
      const prints = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
      shown.push(String.fromCharCode(prints ? byte : next++));
    }
    return shown;
  })();

  function idsOf(piece, { vocab, ranks, known }) {
    if (known.has(piece)) return known.get(piece);
    const parts = Array.from(new TextEncoder().encode(piece), (byte) => SHOWN[byte]);
    for (;;) {
      let [least, place] = [Infinity, -1];
      for (let at = 0; at + 1 < parts.length; at++) {
        const rank = ranks.get(`${parts[at]}\n${parts[at + 1]}`);
        if (rank < least) [least, place] = [rank, at];
      }
      if (place < 0) break;
      parts.splice(place, 2, parts[place] + parts[place + 1]);
    }
    const ids = parts.map((part) => vocab.get(part));
    known.set(piece, ids);
    return ids;
  }

  // (max_tokens,) int32: each id plus 1, padded with zeros; the first is negative after a cut.
  function tokensOf(text, contract) {
    const { max_bytes: size, max_tokens: most } = contract;
    const tokenizer = tokenizerOf(contract);
    let encoded = new TextEncoder().encode(text);
    const isLong = encoded.length > size;
    if (isLong) encoded = encoded.subarray(0, wholeCharacters(encoded, size));
    const pieces = new TextDecoder("utf-8", { ignoreBOM: true }).decode(encoded)
      .match(tokenizer.pieces) || [];
    const ids = pieces.flatMap((piece) => idsOf(piece, tokenizer));
    const row = new Int32Array(most);
    row.set((ids.length ? ids : [0]).slice(0, most).map((id) => id + 1));
    if (isLong || ids.length > most) row[0] = -row[0];
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
    return contract.tokenizer ? tokensOf(text, contract) : bytesOf(text, contract.max_bytes);
  }

  slipway.texts = { fromRow, fromTexts: fromRow };
})();
