// From the bytes of an image file to the pixels that the network takes, equal to Pillow's.
//
// PNG: decoded here, bit for bit. JPEG: decoded by the browser; its difference is measured by the
// hop `browser`. Everything after the decoder is integer arithmetic as in Pillow's C code.
"use strict";

globalThis.slipway = globalThis.slipway || {};

(() => {
  const PNG = [0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a];
  const CHANNELS = { 0: 1, 2: 3, 3: 1, 4: 2, 6: 4 }; // by PNG colour type
  const DEPTHS = { 0: [1, 2, 4, 8, 16], 2: [8, 16], 3: [1, 2, 4, 8], 4: [8, 16], 6: [8, 16] };
  // First column, first row, column step, row step of Adam7's passes.
  const ADAM7 = [
    [0, 0, 8, 8], [4, 0, 8, 8], [0, 4, 4, 8], [2, 0, 4, 4], [0, 2, 2, 4], [1, 0, 2, 2],
    [0, 1, 1, 2],
  ];
  const ORIENTATION = 0x0112; // EXIF tag

  class ImageProblem extends Error {}

  function refuse(found, expected, fix) {
    throw new ImageProblem(`${found}; expected ${expected}. ${fix}`);
  }

  const damaged = (what) =>
    refuse(`the file is truncated or damaged: ${what}`, "a whole file", "Save it again.");

  function checkSize(width, height, maxPixels) {
    if (!width || !height) damaged(`its size is ${width}x${height}`);
    if (width * height > maxPixels) {
      refuse(`the image has ${width}x${height} pixels`, `at most ${maxPixels}`, "Make it smaller.");
    }
  }

  // --- PNG -------------------------------------------------------------------------------------

  const CRC = Uint32Array.from({ length: 256 }, (_, start) => {
    let value = start;
    for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
    return value;
  });

  function crc32(bytes, begin, end) {
    let value = 0xffffffff;
    for (let at = begin; at < end; at++) value = CRC[(value ^ bytes[at]) & 255] ^ (value >>> 8);
    return ~value >>> 0;
  }

  const ascii = (bytes) => String.fromCharCode(...bytes);

  function readChunks(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const found = { pixels: [], orientation: 1 };
    for (let at = 8; at + 12 <= bytes.length; ) {
      const length = view.getUint32(at);
      const begin = at + 8;
      const end = begin + length;
      if (end + 4 > bytes.length) break;
      const type = ascii(bytes.subarray(at + 4, at + 8));
      if (view.getUint32(end) !== crc32(bytes, at + 4, end)) damaged(`checksum of ${type}`);
      const content = bytes.subarray(begin, end);
      if (type === "IHDR") found.header = new DataView(bytes.buffer, bytes.byteOffset + begin, 13);
      else if (type === "PLTE") found.palette = content;
      else if (type === "tRNS") found.transparency = content;
      else if (type === "IDAT") found.pixels.push(content);
      else if (type === "eXIf") found.orientation = exifOrientation(content);
      else if (type === "iTXt" || type === "zTXt") refuseHiddenOrientation(type, content);
      else if (type === "IEND") return found;
      at = end + 4;
    }
    return damaged("it has no end");
  }

  // Pillow also turns an image by an orientation in XMP or in a profile that is kept as text.
  function refuseHiddenOrientation(type, content) {
    const keyword = ascii(content.subarray(0, Math.min(content.indexOf(0), 80)));
    const isExif = /^raw profile type exif$/i.test(keyword);
    if (isExif || (keyword === "XML:com.adobe.xmp" && /Orientation/.test(text(content)))) {
      refuse("the PNG may hold an orientation in its texts", "one in eXIf or none",
        "Save it upright and without metadata.");
    }
  }

  const text = (content) => new TextDecoder("latin1").decode(content);

  function exifOrientation(content) {
    const view = new DataView(content.buffer, content.byteOffset, content.byteLength);
    if (view.byteLength < 8) return 1;
    const little = view.getUint16(0) === 0x4949;
    const start = view.getUint32(4, little);
    if (start + 2 > view.byteLength) return 1;
    const count = view.getUint16(start, little);
    for (let entry = 0; entry < count; entry++) {
      const at = start + 2 + 12 * entry;
      if (at + 12 > view.byteLength) return 1;
      if (view.getUint16(at, little) === ORIENTATION) return view.getUint16(at + 8, little);
    }
    return 1;
  }

  async function inflate(parts, numBytes) {
    const reader = new Blob(parts).stream().pipeThrough(new DecompressionStream("deflate"))
      .getReader();
    const found = new Uint8Array(numBytes);
    let filled = 0;
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const taken = value.subarray(0, numBytes - filled);
        found.set(taken, filled);
        filled += taken.length;
        if (filled === numBytes) break; // pixels are whole; Pillow ignores the rest as well
      }
      await reader.cancel();
    } catch (error) {
      if (filled < numBytes) damaged(String(error.message || error));
    }
    if (filled < numBytes) damaged("pixels are missing");
    return found;
  }

  const rowBytes = (width, bits) => Math.ceil((width * bits) / 8);

  // Undoes the filters of `height` rows in place; returns the position after them.
  function unfilter(data, at, height, length, step) {
    let above = null;
    for (let row = 0; row < height; row++) {
      const filter = data[at];
      const line = data.subarray(at + 1, at + 1 + length);
      if (filter > 4) damaged(`filter ${filter}`);
      for (let x = 0; x < length && filter; x++) {
        const left = x >= step ? line[x - step] : 0;
        const up = above ? above[x] : 0;
        if (filter === 1) line[x] += left;
        else if (filter === 2) line[x] += up;
        else if (filter === 3) line[x] += (left + up) >> 1;
        else {
          const corner = above && x >= step ? above[x - step] : 0;
          const [toLeft, toUp] = [Math.abs(up - corner), Math.abs(left - corner)];
          const toCorner = Math.abs(left + up - 2 * corner);
          if (toLeft <= toUp && toLeft <= toCorner) line[x] += left;
          else line[x] += toUp <= toCorner ? up : corner;
        }
      }
      above = line;
      at += 1 + length;
    }
    return at;
  }

  // Returns {width, height, channels, depth, type, samples}: samples as in the file, unscaled.
  async function readPngSamples(chunks, maxPixels) {
    const { header } = chunks;
    if (!header || !chunks.pixels.length) damaged("it has no header or no pixels");
    const [width, height] = [header.getUint32(0), header.getUint32(4)];
    const [depth, type] = [header.getUint8(8), header.getUint8(9)];
    checkSize(width, height, maxPixels);
    if (!(DEPTHS[type] || []).includes(depth) || header.getUint8(12) > 1) damaged("its header");
    const channels = CHANNELS[type];
    const bits = channels * depth;
    const passes = (header.getUint8(12) ? ADAM7 : [[0, 0, 1, 1]])
      .map(([left, top, dx, dy]) => ({
        left, top, dx, dy,
        columns: Math.ceil((width - left) / dx),
        rows: Math.ceil((height - top) / dy),
      }))
      .filter(({ columns, rows }) => columns > 0 && rows > 0);
    const sizes = passes.map(({ columns, rows }) => rows * (1 + rowBytes(columns, bits)));
    const data = await inflate(chunks.pixels, sizes.reduce((sum, size) => sum + size, 0));
    const samples = new Uint16Array(width * height * channels);
    let at = 0;
    for (const { left, top, dx, dy, columns, rows } of passes) {
      const length = rowBytes(columns, bits);
      const begin = at;
      at = unfilter(data, at, rows, length, Math.max(1, bits >> 3));
      for (let row = 0; row < rows; row++) {
        const line = begin + row * (1 + length) + 1;
        for (let sample = 0; sample < columns * channels; sample++) {
          const column = left + dx * Math.floor(sample / channels);
          const place = ((top + dy * row) * width + column) * channels + (sample % channels);
          if (depth === 8) samples[place] = data[line + sample];
          else if (depth === 16) {
            samples[place] = (data[line + 2 * sample] << 8) | data[line + 2 * sample + 1];
          } else {
            const shift = 8 - depth - ((sample * depth) & 7);
            samples[place] = (data[line + ((sample * depth) >> 3)] >> shift) & ((1 << depth) - 1);
          }
        }
      }
    }
    return { width, height, channels, depth, type, samples };
  }

  // To RGBA, and to how many channels it counts as: 1 for grey, 3 for colours.
  async function decodePng(bytes, maxPixels) {
    const chunks = readChunks(bytes);
    const found = await readPngSamples(chunks, maxPixels);
    const { width, height, channels, depth, type, samples } = found;
    const { palette, transparency } = chunks;
    const rgba = new Uint8ClampedArray(width * height * 4).fill(255);
    const scale = depth < 8 && type === 0 ? 255 / ((1 << depth) - 1) : 1;
    const level = (value) => (depth === 16 ? value >> 8 : value * scale);
    if (type === 2 && depth === 16 && transparency) {
      refuse("the PNG has 16 bits per colour and a transparent colour", "8 bits",
        "Save it with 8 bits.");
    }
    if (type === 3 && !palette) damaged("it has no palette");
    const key = transparency && type !== 3
      ? Array.from({ length: transparency.length >> 1 },
          (_, part) => (transparency[2 * part] << 8) | transparency[2 * part + 1])
      : null;
    if (key && depth === 1) key[0] = key[0] ? 255 : 0; // as Pillow compares them
    for (let pixel = 0; pixel < width * height; pixel++) {
      const from = pixel * channels;
      const to = pixel * 4;
      if (type === 3) {
        const entry = samples[from];
        if (3 * entry + 2 >= palette.length) damaged(`there is no colour ${entry}`);
        rgba.set(palette.subarray(3 * entry, 3 * entry + 3), to);
        if (transparency && entry < transparency.length) rgba[to + 3] = transparency[entry];
      } else if (channels <= 2) {
        const value = samples[from];
        const grey = depth === 16 && type === 0 ? Math.floor(value / 257) : level(value);
        rgba[to] = rgba[to + 1] = rgba[to + 2] = grey;
        if (channels === 2) rgba[to + 3] = level(samples[from + 1]);
        else if (key && depth < 16 && grey === key[0]) rgba[to + 3] = 0;
      } else {
        for (let part = 0; part < channels; part++) rgba[to + part] = level(samples[from + part]);
        if (key && key.every((value, part) => value === samples[from + part])) rgba[to + 3] = 0;
      }
    }
    return turned({ width, height, rgba }, chunks.orientation);
  }

  // Turns an image upright, as ImageOps.exif_transpose.
  function turned(image, orientation) {
    if (!(orientation >= 2 && orientation <= 8)) return image;
    const { width, height, rgba } = image;
    const swaps = orientation >= 5;
    const [wide, high] = swaps ? [height, width] : [width, height];
    const from = new Uint32Array(rgba.buffer);
    const to = new Uint32Array(wide * high);
    for (let y = 0; y < high; y++) {
      for (let x = 0; x < wide; x++) {
        let [u, v] = swaps ? [y, x] : [x, y];
        if ([2, 3, 7, 8].includes(orientation)) u = width - 1 - u;
        if ([3, 4, 6, 7].includes(orientation)) v = height - 1 - v;
        to[y * wide + x] = from[v * width + u];
      }
    }
    return { width: wide, height: high, rgba: new Uint8ClampedArray(to.buffer) };
  }

  // --- JPEG ------------------------------------------------------------------------------------

  function readJpegHeader(bytes) {
    for (let at = 2; at + 9 < bytes.length && bytes[at] === 0xff; ) {
      const marker = bytes[at + 1];
      const isFrame = marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker);
      const number = (place) => (bytes[place] << 8) | bytes[place + 1];
      if (isFrame) {
        return { height: number(at + 5), width: number(at + 7), channels: bytes[at + 9] };
      }
      at += 2 + number(at + 2);
    }
    return damaged("it has no frame");
  }

  async function decodeJpeg(bytes, maxPixels) {
    const { width, height, channels } = readJpegHeader(bytes);
    checkSize(width, height, maxPixels);
    if (channels !== 1 && channels !== 3) {
      refuse(`the JPEG has ${channels} colour channels`, "grey or RGB", "Save it as RGB.");
    }
    let bitmap;
    try {
      bitmap = await createImageBitmap(new Blob([bytes], { type: "image/jpeg" }), {
        colorSpaceConversion: "none",
        imageOrientation: "from-image",
        premultiplyAlpha: "none",
      });
    } catch (error) {
      damaged(String(error.message || error));
    }
    return drawn(bitmap);
  }

  // The pixels of an opaque bitmap or video frame, at its own size.
  function drawn(bitmap) {
    const width = bitmap.videoWidth || bitmap.width;
    const height = bitmap.videoHeight || bitmap.height;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d", { willReadFrequently: true, colorSpace: "srgb" });
    context.drawImage(bitmap, 0, 0);
    return { width, height, rgba: context.getImageData(0, 0, width, height).data };
  }

  // --- from RGBA to the network's pixels -------------------------------------------------------

  // Puts transparent pixels on white, and converts to one or three channels, as Pillow.
  function flatten({ width, height, rgba }, channels) {
    const pixels = new Uint8Array(width * height * channels);
    const over = (value, alpha) => {
      if (alpha === 255) return value;
      if (alpha === 0) return 255;
      const sum = (value * alpha + 255 * (255 - alpha)) * 128 + (0x80 << 7);
      return (((sum >> 8) + sum) >> 8) >> 7;
    };
    for (let pixel = 0; pixel < width * height; pixel++) {
      const from = 4 * pixel;
      const alpha = rgba[from + 3];
      const [red, green, blue] = [0, 1, 2].map((part) => over(rgba[from + part], alpha));
      if (channels === 1) {
        pixels[pixel] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
      } else {
        pixels[3 * pixel] = red;
        pixels[3 * pixel + 1] = green;
        pixels[3 * pixel + 2] = blue;
      }
    }
    return { width, height, channels, pixels };
  }

  const sinc = (x) => (x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI));
  const FILTERS = {
    bilinear: { support: 1, weight: (x) => Math.max(0, 1 - Math.abs(x)) },
    bicubic: {
      support: 2,
      weight: (x) => {
        const a = -0.5;
        x = Math.abs(x);
        if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
        return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
      },
    },
    lanczos: { support: 3, weight: (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0) },
  };
  const FIXED = 2 ** 22; // Pillow's fixed point: 32 bits less 8 of the pixel and 2 of the filter

  // For each of `size` output pixels: the first input pixel and the integer weights from there.
  function weightsOf(inputSize, from, to, size, { support, weight }) {
    [from, to] = [Math.fround(from), Math.fround(to)];
    const scale = Math.fround(to - from) / size;
    const filterScale = Math.max(1, scale);
    const reach = support * filterScale;
    const inverse = 1 / filterScale;
    return Array.from({ length: size }, (_, place) => {
      const center = from + (place + 0.5) * scale;
      const first = Math.max(0, Math.trunc(center - reach + 0.5));
      const end = Math.min(inputSize, Math.trunc(center + reach + 0.5));
      const found = new Float64Array(end - first);
      let sum = 0;
      for (let x = 0; x < found.length; x++) {
        found[x] = weight((x + first - center + 0.5) * inverse);
        sum += found[x];
      }
      return {
        first,
        values: found.map((value) => {
          const share = (sum === 0 ? value : value / sum) * FIXED;
          return Math.trunc(share < 0 ? share - 0.5 : share + 0.5);
        }),
      };
    });
  }

  const clip = (sum) => Math.min(255, Math.max(0, Math.floor(sum / FIXED)));

  function acrossColumns({ width, height, channels, pixels }, left, right, wide, filter) {
    if (wide === width && !left && right === wide) return { width, height, channels, pixels };
    const columns = weightsOf(width, left, right, wide, filter);
    const made = new Uint8Array(wide * height * channels);
    for (let y = 0; y < height; y++) {
      columns.forEach(({ first, values }, x) => {
        for (let part = 0; part < channels; part++) {
          let sum = FIXED / 2;
          for (let at = 0; at < values.length; at++) {
            sum += pixels[(y * width + first + at) * channels + part] * values[at];
          }
          made[(y * wide + x) * channels + part] = clip(sum);
        }
      });
    }
    return { width: wide, height, channels, pixels: made };
  }

  function acrossRows({ width, height, channels, pixels }, top, bottom, high, filter) {
    if (high === height && !top && bottom === high) return { width, height, channels, pixels };
    const length = width * channels;
    const made = new Uint8Array(length * high);
    weightsOf(height, top, bottom, high, filter).forEach(({ first, values }, y) => {
      for (let place = 0; place < length; place++) {
        let sum = FIXED / 2;
        for (let at = 0; at < values.length; at++) {
          sum += pixels[(first + at) * length + place] * values[at];
        }
        made[y * length + place] = clip(sum);
      }
    });
    return { width, height: high, channels, pixels: made };
  }

  function resample(image, [left, top, right, bottom], wide, high, filter) {
    const columns = (given) => acrossColumns(given, left, right, wide, filter);
    const rows = (given) => acrossRows(given, top, bottom, high, filter);
    // Each pass rounds to 8 bits, so their order counts. This is Pillow's.
    const fewer = image.height - high;
    const isRowsFirst = fewer > 0 && fewer > 2 * (image.width - wide);
    return isRowsFirst ? columns(rows(image)) : rows(columns(image));
  }

  function nearest(image, [left, top, right, bottom], wide, high) {
    const places = (from, to, size) => {
      const step = (Math.fround(to) - Math.fround(from)) / size;
      let at = Math.fround(from) + step * 0.5;
      return Array.from({ length: size }, () => {
        const place = Math.trunc(at);
        at += step;
        return place;
      });
    };
    const { width, channels, pixels } = image;
    const [columns, rows] = [places(left, right, wide), places(top, bottom, high)];
    const made = new Uint8Array(wide * high * channels);
    rows.forEach((row, y) => columns.forEach((column, x) => {
      for (let part = 0; part < channels; part++) {
        made[(y * wide + x) * channels + part] = pixels[(row * width + column) * channels + part];
      }
    }));
    return { width: wide, height: high, channels, pixels: made };
  }

  function resized(image, box, wide, high, interpolation) {
    const { width, height } = image;
    const isWhole = !box[0] && !box[1] && box[2] === width && box[3] === height;
    if (isWhole && wide === width && high === height) return image;
    if (interpolation === "nearest") return nearest(image, box, wide, high);
    return resample(image, box, wide, high, FILTERS[interpolation]);
  }

  // Python's round: halves go to the even number.
  function roundHalfEven(value) {
    const floor = Math.floor(value);
    if (value - floor !== 0.5) return Math.round(value);
    return floor % 2 ? floor + 1 : floor;
  }

  // Brings an image to size_px x size_px by the contract's mode: stretch, crop or pad.
  function fit(image, { size_px: size, resize_mode: mode, interpolation }) {
    const { width, height, channels } = image;
    if (width === size && height === size) return image;
    if (mode === "crop") {
      const side = Math.min(width, height);
      const [left, top] = [(width - side) * 0.5, (height - side) * 0.5];
      return resized(image, [left, top, left + side, top + side], size, size, interpolation);
    }
    if (mode !== "pad" || width === height) {
      return resized(image, [0, 0, width, height], size, size, interpolation);
    }
    let [wide, high] = [size, size];
    if (width > height) high = roundHalfEven((height / width) * size);
    else wide = roundHalfEven((width / height) * size);
    const padded = new Uint8Array(size * size * channels);
    if (wide && high) {
      const small = resized(image, [0, 0, width, height], wide, high, interpolation);
      const left = wide === size ? 0 : roundHalfEven((size - wide) * 0.5);
      const top = wide === size ? roundHalfEven((size - high) * 0.5) : 0;
      for (let y = 0; y < high; y++) {
        const line = small.pixels.subarray(y * wide * channels, (y + 1) * wide * channels);
        padded.set(line, ((top + y) * size + left) * channels);
      }
    }
    return { width: size, height: size, channels, pixels: padded };
  }

  const startsWith = (bytes, start) => start.every((value, at) => bytes[at] === value);

  async function decode(bytes, contract) {
    if (!bytes.length) refuse("the file has 0 bytes", "an image", "Choose another file.");
    if (startsWith(bytes, PNG)) return decodePng(bytes, contract.max_pixels);
    if (startsWith(bytes, [0xff, 0xd8])) return decodeJpeg(bytes, contract.max_pixels);
    return refuse("the file is neither PNG nor JPEG", "one of these", "Convert it to PNG.");
  }

  slipway.images = {
    // (size_px * size_px * channels) uint8 of the bytes of a PNG or JPEG.
    fromBytes: async (bytes, contract) => {
      const image = await decode(bytes, contract);
      return fit(flatten(image, contract.channels), contract).pixels;
    },
    // The same of a frame of a camera, whose pixels no certificate covers.
    fromFrame: (video, contract) => fit(flatten(drawn(video), contract.channels), contract).pixels,
  };
})();
