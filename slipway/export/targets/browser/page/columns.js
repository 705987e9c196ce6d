// From one row of a table, as JSON or as texts of a form, to the numbers that the network takes.
"use strict";

(() => {
  const SECONDS_PER_DAY = 86400;
  const MAX_CATEGORY_LENGTH = 256;
  const SHOWN_CATEGORIES = 8;
  // ISO 8601 as the page reads it; the service also reads rarer forms.
  const DATE = new RegExp(
    "^(\\d{4})-(\\d{2})-(\\d{2})" +
      "(?:[T ](\\d{2}):(\\d{2})(?::(\\d{2})(?:\\.(\\d{1,6}))?)?(Z|[+-]\\d{2}:\\d{2})?)?$",
  );
  // The characters that Python's str.strip removes.
  const SPACE =
    "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]";
  const ENDS = new RegExp(`^${SPACE}+|${SPACE}+$`, "g");
  const strip = (text) => text.replace(ENDS, "");

  function expected(column) {
    if (column.kind === "category") {
      const more = column.categories.length > SHOWN_CATEGORIES ? ", ..." : "";
      return `one of: ${column.categories.slice(0, SHOWN_CATEGORIES).join(", ")}${more}`;
    }
    if (column.kind === "boolean") return "true or false";
    if (column.kind === "date") return "a date such as 2026-11-20 or 2026-11-20T12:00:00Z";
    const least = column.min === null ? "" : ` at least ${column.min}`;
    return `a finite number${least}${column.max === null ? "" : ` at most ${column.max}`}`;
  }

  function refuse(column, found) {
    throw new Error(
      `${column.name}: ${found}; expected ${expected(column)}. Correct this cell.`,
    );
  }

  function daysOf(text) {
    const parts = DATE.exec(strip(text));
    if (!parts) return NaN;
    const [year, month, day, hour, minute, second] = parts.slice(1, 7).map((part) => +(part || 0));
    const midnight = new Date(0);
    midnight.setUTCFullYear(year, month - 1, day);
    if (!year || midnight.getUTCMonth() !== month - 1 || midnight.getUTCDate() !== day) return NaN;
    if (hour > 23 || minute > 59 || second > 59) return NaN;
    let seconds = midnight.getTime() / 1000 + hour * 3600 + minute * 60 + second;
    seconds += Number((parts[7] || "").padEnd(6, "0")) / 1e6;
    const zone = parts[8];
    if (zone && zone !== "Z") {
      const offset = +zone.slice(1, 3) * 3600 + +zone.slice(4, 6) * 60;
      if (offset >= SECONDS_PER_DAY || +zone.slice(4, 6) > 59) return NaN;
      seconds -= zone[0] === "-" ? -offset : offset;
    }
    return seconds / SECONDS_PER_DAY;
  }

  function cellOf(value, column) {
    const takesMissing = column.has_missing || column.imputed;
    if (value === null || value === undefined || (typeof value === "string" && !strip(value))) {
      if (column.required || !takesMissing) refuse(column, "a value is missing");
      return null;
    }
    let cell;
    if (column.kind === "category" && typeof value === "string") {
      cell = strip(value);
      if (Object.hasOwn(column.map ?? {}, cell)) cell = column.map[cell];
      if ([...cell].length > MAX_CATEGORY_LENGTH) refuse(column, "found a long text");
      if (!column.categories.includes(cell) && !takesMissing) refuse(column, `found '${cell}'`);
      return cell;
    }
    if (column.kind === "boolean" && typeof value === "boolean") cell = Number(value);
    if (column.kind === "number" && typeof value === "number") cell = value;
    if (column.kind === "date" && typeof value === "string") cell = daysOf(value);
    if (!Number.isFinite(cell)) refuse(column, `found ${JSON.stringify(value)}`);
    const isLow = column.min !== null && cell < column.min;
    if (isLow || (column.max !== null && cell > column.max)) refuse(column, `found ${cell}`);
    return cell;
  }

  // (width,) float32: values, indicators of missing ones, and codes of categories.
  function fromRow(row, contract) {
    const known = new Set([...contract.columns.map(({ name }) => name), ...contract.ignored]);
    for (const name of Object.keys(row)) {
      if (!known.has(name)) {
        throw new Error(
          `there is no column '${name}'; expected ${[...known].join(", ")}. Leave it out.`,
        );
      }
    }
    const cells = contract.columns.map((column) => [column, cellOf(row[column.name], column)]);
    const numbers = cells.filter(([column]) => column.kind !== "category");
    const values = numbers.map(([column, cell]) => {
      const value = Math.fround(((cell === null ? column.fill : cell) - column.mean) / column.std);
      if (!Number.isFinite(value)) refuse(column, "found a number too large for 32 bits");
      return value;
    });
    const indicators = numbers.filter(([column]) => column.has_missing)
      .map(([, cell]) => Number(cell === null));
    const codes = cells.filter(([column]) => column.kind === "category")
      .map(([column, cell]) => {
        const place = column.categories.indexOf(cell);
        return place < 0 ? Number(!column.has_missing) : place + 1;
      });
    return new Float32Array([...values, ...indicators, ...codes]);
  }

  // The same from a form, whose cells are texts: numbers and booleans are parsed first.
  function fromTexts(texts, contract) {
    const row = {};
    for (const column of contract.columns) {
      const text = strip(texts[column.name] ?? "");
      row[column.name] = text;
      if (column.kind === "number" && text) {
        row[column.name] = Number.isNaN(Number(text)) ? text : Number(text);
      }
      if (column.kind === "boolean" && /^(true|false)$/i.test(text)) {
        row[column.name] = text.toLowerCase() === "true";
      }
    }
    return fromRow(row, contract);
  }

  slipway.columns = { fromRow, fromTexts };
})();
