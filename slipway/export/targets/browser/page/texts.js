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
  // Characters that show nothing by themselves, such as joiners and marks of direction.
  const INVISIBLE =
    /[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\u{e0000}-\u{e01ef}]+/gu;
  const joined = (text) => text.replace(SPACE, " ").replace(/^ | $/g, "");
  const first = (text, most) =>
    text.length > most ? Array.from(text).slice(0, most).join("") : text;

  function classOf(ranges) {
    const escaped = (code) => `\\u{${code.toString(16)}}`;
    return ranges.map(([low, high]) => `${escaped(low)}-${escaped(high)}`).join("");
  }

  // The functions of a contract, made once: of its tokenizer and its masks.
  function once(make) {
    const made = new Map();
    return (contract) => {
      if (!made.has(contract)) made.set(contract, make(contract));
      return made.get(contract);
    };
  }

  // A browser knows characters that the training did not, and would compose them.
  const splitterOf = once(({ unassigned }) => new RegExp(`([${classOf(unassigned)}])`, "u"));

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

  // Payment cards (ISO/IEC 7812-1) have 13 to 19 digits, with a check digit.
  function isCard(written, digits) {
    const { length } = digits;
    if (length < 13 || length > 19 || written[0] === "+" || digits[0] < 2 || digits[0] > 6) {
      return false;
    }
    const sum = digits.reverse().reduce((total, digit, place) => (
      total + (place % 2 ? 2 * digit - 9 * (digit > 4) : digit)), 0);
    return sum % 10 === 0;
  }

  function isPhone(written, digits, forms) {
    const { length } = digits;
    if (written[0] === "+" || (digits[0] === 0 && digits[1] === 0)) {
      return length >= 8 && length <= 15;
    }
    if (digits[0] === 0) return length >= 9 && length <= 11;
    return forms.some((form) => form.test(written));
  }

  // A function that replaces personal data by its kind in brackets.
  const maskOf = once(({ masked, digits: ranges, patterns }) => {
    if (!masked.length) return (text) => text;
    const numerals = classOf(ranges);
    const compiled = (pattern, flags) => new RegExp(pattern.replaceAll(/(\[[^\]]*)?\\d/gu,
      (_, inside) => (inside === undefined ? `[${numerals}]` : inside + numerals)), flags);
    const email = new RegExp(patterns.email, "gu");
    const number = compiled(patterns.number, "gu");
    const forms = patterns.national_forms.map((form) => compiled(`^(?:${form})$`, "u"));
    const valueOf = (character) => {
      const code = character.codePointAt(0);
      const range = ranges.find(([low, high]) => code >= low && code <= high);
      return range ? (code - range[0]) % 10 : null;
    };

    function* numbers(text, begin, end) {
      const part = text.slice(0, end);
      number.lastIndex = begin;
      for (let match = number.exec(part); match; match = number.exec(part)) {
        const [written] = match;
        const digits = Array.from(written, valueOf).filter((value) => value !== null);
        const place = { begin: match.index, end: match.index + written.length };
        if (isCard(written, [...digits])) yield { kind: "card", ...place };
        else if (isPhone(written, digits, forms)) yield { kind: "phone", ...place };
      }
    }

    function* found(text) {
      let end = 0;
      for (const match of text.matchAll(email)) {
        yield* numbers(text, end, match.index);
        end = match.index + match[0].length;
        yield { kind: "email", begin: match.index, end };
      }
      yield* numbers(text, end, text.length);
    }

    return (text) => {
      const parts = [];
      let last = 0;
      for (const { kind, begin, end } of found(text)) {
        if (masked.includes(kind)) {
          parts.push(text.slice(last, begin), `[${kind}]`);
          last = end;
        }
      }
      return parts.join("") + text.slice(last);
    };
  });

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

  // A ByteLevel BPE: pieces of a text, their bytes as printable characters, and joined pairs.
  function bytePairs({ vocabulary, merges, letters: ofLetters, numbers: ofNumbers }) {
    const [letters, numbers] = [classOf(ofLetters), classOf(ofNumbers)];
    const pieces = new RegExp(`'(?:[stmd]|re|ve|ll)| ?[${letters}]+| ?[${numbers}]+|` +
      ` ?[^ \\n${letters}${numbers}]+|[ \\n]+(?![^ \\n])|[ \\n]+`, "gu");
    const ids = new Map(vocabulary);
    const ranks = new Map(merges.map((pair, rank) => [pair.join("\n"), rank]));

    function idsOf(piece) {
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
      return parts.map((part) => ids.get(part));
    }

    return { piecesOf: (text) => text.match(pieces) || [], idsOf };
  }

  // BERT's WordPiece: normalised words and punctuation, each as its longest known pieces.
  function wordPieces(facts) {
    const { vocabulary, prefix, unknown, most_characters: most } = facts;
    const ids = new Map(vocabulary);
    const changed = new Map(Object.entries(facts.changed));
    const oneOf = (ranges) => new RegExp(ranges.length ? `[${classOf(ranges)}]` : "(?!)", "gu");
    const [removed, spaced] = [oneOf(facts.removed), oneOf(facts.spaced)];
    const punctuation = oneOf(facts.punctuation);

    function piecesOf(text) {
      const plain = text.replace(removed, "").replace(spaced, " $& ");
      const read = Array.from(plain, (character) => changed.get(character) ?? character).join("");
      return read.replace(punctuation, " $& ").split(/[ \n]+/).filter((word) => word);
    }

    function idsOf(word) {
      const characters = Array.from(word);
      const found = [];
      if (characters.length > most) return [unknown];
      for (let begin = 0; begin < characters.length;) {
        let end = characters.length;
        const before = begin ? prefix : "";
        const known = () => ids.get(before + characters.slice(begin, end).join(""));
        while (end > begin && known() === undefined) end--;
        if (end === begin) return [unknown];
        found.push(known());
        begin = end;
      }
      return found;
    }

    return { piecesOf, idsOf };
  }

  // A function from texts to the ids of each.
  const tokenizerOf = once(({ tokenizer }) => {
    const { piecesOf, idsOf } = (tokenizer.type === "BPE" ? bytePairs : wordPieces)(tokenizer);
    const known = new Map();
    const remembered = (piece) => {
      if (!known.has(piece)) known.set(piece, idsOf(piece));
      return known.get(piece);
    };
    return (text) => piecesOf(text).flatMap(remembered);
  });

  // The numbers of tokens of two texts that have room, as the package tokenizers divides it.
  function lengthsOf([first, second], room) {
    const [short, long] = first < second ? [first, second] : [second, first];
    let lengths = [short, short > room ? short : Math.max(short, room - short)];
    if (lengths[0] + lengths[1] > room) lengths = [room >> 1, (room >> 1) + (room % 2)];
    return first > second ? lengths.reverse() : lengths;
  }

  // The whole characters in the first `size` bytes.
  const cut = (encoded, size) => new TextDecoder("utf-8", { ignoreBOM: true })
    .decode(encoded.subarray(0, encoded.length > size ? wholeCharacters(encoded, size) : size));

  // The two texts of a pair. With the separator they have at most `size` bytes.
  function pairOf(encoded, size) {
    const end = encoded.indexOf(SEPARATOR.charCodeAt(0));
    const second = encoded.subarray(end + 1);
    const room = size - SEPARATOR.length;
    const most = Math.min(second.length, Math.max(room - end, room >> 1));
    return [cut(encoded.subarray(0, end), room - most), cut(second, most)];
  }

  // (max_tokens,) int32: each id plus 1, padded with zeros; the first is negative after a cut.
  function tokensOf(text, contract) {
    const { max_bytes: size, max_tokens: most, is_pair: isPair, tokenizer } = contract;
    const encoded = new TextEncoder().encode(text);
    const texts = isPair ? pairOf(encoded, size) : [cut(encoded, size)];
    const found = texts.map(tokenizerOf(contract));
    const around = tokenizer.around[texts.length - 1];
    const room = most - around.flat().length;
    const total = found.reduce((sum, ids) => sum + ids.length, 0);
    if (total > room) {
      const lengths = isPair ? lengthsOf(found.map((ids) => ids.length), room) : [room];
      lengths.forEach((length, place) => { found[place] = found[place].slice(0, length); });
    }
    const ids = [...around[0], ...found.flatMap((own, place) => [...own, ...around[place + 1]])];
    const row = new Int32Array(most);
    row.set((ids.length ? ids : [0]).map((id) => id + 1));
    if (encoded.length > size || total > room) row[0] = -row[0];
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
    if (!cells.some((cell) => joined(cell.replace(INVISIBLE, "")))) {
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
    const masked = maskOf(contract);
    const text = cells.map((cell) => masked(seen(cell, contract))).join(SEPARATOR);
    return contract.tokenizer ? tokensOf(text, contract) : bytesOf(text, contract.max_bytes);
  }

  slipway.texts = { fromRow, fromTexts: fromRow };
})();
