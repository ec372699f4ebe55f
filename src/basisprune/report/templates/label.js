"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const UNKNOWN = "?", MOST_FOUND = 8, SMALL = 160;
let given = [...data.given];  // [item, class or "?"], in the order in which they were given
try { given = JSON.parse(localStorage.getItem(data.key)) || given; } catch (error) { /* private mode */ }

const labels = () => new Map(given);
const save = () => { try { localStorage.setItem(data.key, JSON.stringify(given)); } catch (error) { /* private mode */ } };

// Tango's score of a loss on the same images, as basisprune/budget/proportions.py computes it.
function score(lost, won, images, margin) {
  const linear = (2 * images - lost + won) * margin - lost - won;
  const root = Math.sqrt(Math.max(linear * linear + 8 * images * won * margin * (1 - margin), 0));
  const share = Math.max((root - linear) / (4 * images), -margin, 0);
  const variance = images * (2 * share + margin * (1 - margin));
  const distance = lost - won - images * margin;
  return variance > 0 ? distance / Math.sqrt(variance) : Math.sign(distance) * Infinity;
}

// What became of a labelled image: 1 if only the unpruned network is right, -1 if only the pruned one is.
function difference(item, candidate, label) {
  if (item.said[candidate] === item.said[0]) return 0;
  return label === UNKNOWN ? 1 : Number(label === item.said[0]) - Number(label === item.said[candidate]);
}

// What an image without a label counts as: the worst for the pruned network, or the best.
function passes(candidate, known, unlabelled) {
  return data.looks.some(([count, needed]) => {
    let lost = 0, won = 0;
    data.items.forEach((item, index) => {
      if (item.place >= count || item.said[candidate] === item.said[0]) return;
      const value = known.has(index) ? difference(item, candidate, known.get(index)) : unlabelled;
      if (value > 0) lost += 1;
      if (value < 0) won += 1;
    });
    return score(lost, won, count, data.margin) <= needed;
  });
}

// Whether the last look would hardly be passed even by a network that loses nothing on the images still to come.
function unlikely(candidate, known) {
  const [count, needed] = data.looks[data.looks.length - 1];
  const open = data.items.find((item, index) => item.said[candidate] !== item.said[0] && !known.has(index));
  if (!open || !open.place) return false;
  let lost = 0, won = 0;
  data.items.forEach((item, index) => {
    if (item.place >= open.place) return;
    const value = difference(item, candidate, known.get(index));
    if (value > 0) lost += 1;
    if (value < 0) won += 1;
  });
  const variance = (lost + won + 1) / open.place;
  const left = needed * Math.sqrt(count * variance) + count * data.margin - (lost - won);
  return left / Math.sqrt((count - open.place) * variance) < data.unlikely;
}

// The candidates are tested from the largest on; the first that fails ends the tests.
function state() {
  const known = labels();
  for (let candidate = 1; candidate <= data.candidates.length; candidate += 1) {
    if (passes(candidate, known, 1)) continue;
    const failed = !passes(candidate, known, -1) || unlikely(candidate, known);
    return { candidate, certified: candidate - 1, failed, known };
  }
  return { candidate: 0, certified: data.candidates.length, failed: false, known };
}

function next(now) {
  if (!now.candidate || now.failed) return -1;
  return data.items.findIndex((item, index) => !now.known.has(index) && item.said[now.candidate] !== item.said[0]);
}

// The same random order of the answers each time an item is shown.
function shuffled(values, seed) {
  const mixed = [...new Set(values)];
  let random = seed * 2654435761 % 4294967296;
  for (let last = mixed.length - 1; last > 0; last -= 1) {
    random = (random * 1664525 + 1013904223) % 4294967296;
    const other = Math.floor(random / 4294967296 * (last + 1));
    [mixed[last], mixed[other]] = [mixed[other], mixed[last]];
  }
  return mixed;
}

function button(text, key, choose) {
  const made = document.createElement("button");
  made.type = "button";
  made.append(text);
  if (key) { const hint = document.createElement("kbd"); hint.textContent = key; made.append(" ", hint); }
  made.addEventListener("click", choose);
  return made;
}

let shown = -1;
function give(label) {
  if (shown < 0) return;
  given.push([shown, label]);
  save();
  draw();
}

function undo() { if (given.length > data.given.length) given.pop(); save(); draw(); }

function verdict(now) {
  const name = now.certified ? data.candidates[now.certified - 1] : "";
  if (!now.candidate) return `Enough: ${name} keeps the budget. Download the labels.`;
  if (now.certified) return `Enough: ${name} keeps the budget, the next smaller network does not. Download the labels.`;
  return "These labels show that the budget is not kept. Download them: the run stays an estimate.";
}

function draw() {
  const now = state(), differing = (item) => now.candidate && item.said[now.candidate] !== item.said[0];
  shown = next(now);
  const open = data.items.filter((item, index) => differing(item) && !now.known.has(index)).length;
  $("progress").value = open + given.length ? given.length / (open + given.length) : 1;
  const passed = now.certified ? `${data.candidates[now.certified - 1]} is certified. ` : "";
  $("status").textContent = `${passed}${given.length} labelled, at most ${shown < 0 ? 0 : open} to go`;
  $("task").hidden = shown < 0;
  $("done").hidden = shown >= 0;
  $("undo").disabled = given.length <= data.given.length;
  if (shown < 0) { $("verdict").textContent = verdict(now); return; }
  const item = data.items[shown], image = $("image");
  image.src = item.source;
  image.onload = () => image.classList.toggle("small", Math.max(image.naturalWidth, image.naturalHeight) < SMALL);
  $("answers").replaceChildren(...shuffled(item.said, item.place + 1).map((label, index) =>
    button(data.classes[label], index + 1, () => give(label))));
  $("search").value = "";
  find();
}

function find() {
  const wanted = $("search").value.trim().toLowerCase();
  const fits = (name) => wanted && name.toLowerCase().includes(wanted);
  const hits = data.classes.map((name, label) => [name, label]).filter(([name]) => fits(name)).slice(0, MOST_FOUND);
  $("found").replaceChildren(...hits.map(([name, label]) => {
    const line = document.createElement("li");
    line.append(button(name, "", () => give(label)));
    return line;
  }));
}

// An apostrophe keeps spreadsheets from computing a cell; it is taken off again when the file is read.
function cell(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function csv() {
  const rows = given.map(([index, label]) =>
    [data.items[index].file, label === UNKNOWN ? UNKNOWN : data.classes[label]].map(cell).join(","));
  return ["file,label", ...rows].join("\r\n") + "\r\n";
}

$("unknown").addEventListener("click", () => give(UNKNOWN));
$("undo").addEventListener("click", undo);
$("search").addEventListener("input", find);
$("download").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
  link.download = "labels.csv";
  link.click();
});
document.addEventListener("keydown", (event) => {
  if (event.target === $("search")) {
    const first = $("found").querySelector("button");
    if (event.key === "Enter" && first) first.click();
    return;
  }
  const answers = [...$("answers").children];
  if (event.key >= "1" && event.key <= String(answers.length)) answers[Number(event.key) - 1].click();
  else if (event.key === "0" || event.key === "?") give(UNKNOWN);
  else if (event.key === "Backspace" || (event.key === "z" && event.ctrlKey)) undo();
  else if (event.key === "/") { event.preventDefault(); $("search").focus(); }
});
draw();
