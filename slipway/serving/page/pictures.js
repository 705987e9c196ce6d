// Input of images: chosen, dropped anywhere on the page, or pasted.

import { html } from "./dom.js";
import { t } from "./texts.js";

export const MOST_PICTURES = 24;
// Browsers know no type of HEIC files, so their endings are named.
const TYPES =
  "image/jpeg,image/png,image/webp,image/bmp,image/tiff,image/gif,image/avif,image/heic,.heic,.heif";

/** The button to choose images. `onChosen` receives the files. */
export function pictureInput(onChosen) {
  const input = html("input", {
    type: "file",
    id: "pictures",
    accept: TYPES,
    multiple: true,
    "aria-describedby": "pictures-hint",
    change: () => {
      onChosen([...input.files]);
      input.value = ""; // allows choosing the same image again
    },
  });
  return html(
    "label",
    { class: "drop card", for: "pictures" },
    input,
    html("span", { class: "drop-title" }, t("pictures.choose")),
    html(
      "span",
      { class: "soft", id: "pictures-hint" },
      t("pictures.hint", { most: MOST_PICTURES }),
    ),
  );
}

/** Listens for dropped and pasted images. `onChosen` receives the files. */
export function listenForPictures(onChosen) {
  const mark = (isOver) => document.body.classList.toggle("dropping", isOver);
  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) mark(false);
  });
  document.addEventListener("drop", (event) => {
    mark(false);
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    onChosen([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) onChosen(files);
  });
}
