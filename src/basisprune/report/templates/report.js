const read = (id) => JSON.parse(document.getElementById(id).textContent);
const figures = read("figures");
const inTheDark = read("palette");
const dark = matchMedia("(prefers-color-scheme: dark)");

// Figures contain the colours of the light theme; in dark mode each is swapped for its counterpart.
function draw() {
  const themed = (figure) =>
    JSON.parse(JSON.stringify(figure).replace(/#[0-9a-f]{6}/g, (colour) => (dark.matches && inTheDark[colour]) || colour));
  for (const [id, figure] of Object.entries(figures)) {
    const { data, layout } = themed(figure);
    Plotly.react(id, data, layout, { responsive: true, displayModeBar: false });
  }
}
draw();
dark.addEventListener("change", draw);

// Images are stored in the page only once, in its JSON.
const changed = read("result").changed || [];
for (const image of document.querySelectorAll("img[data-index]")) image.src = changed[image.dataset.index].image;

document.getElementById("copy")?.addEventListener("click", async ({ target }) => {
  const command = document.getElementById("command");
  getSelection().selectAllChildren(command);
  try {
    await navigator.clipboard.writeText(command.textContent);
    target.textContent = "Copied";
  } catch {
    target.textContent = "Selected";
  }
});
