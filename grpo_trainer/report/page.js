"use strict";
const root = document.documentElement;
const charts = [...document.querySelectorAll(".chart")];
const figures = charts.map((place) => JSON.parse(place.dataset.figure));
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const slider = document.getElementById("smoothing");
let chosen = null; // a theme that was clicked, in place of the system's

const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const palette = (index) => color(`--c${index % 6}`);

function faded(hex, opacity) {
  const part = (from) => parseInt(hex.slice(from, from + 2), 16);
  return `rgba(${part(1)}, ${part(3)}, ${part(5)}, ${opacity})`;
}

// exponential mean, corrected for its start: at weight 0 the values themselves, equal values stay so
function smoothed(values, weight) {
  let mean = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    share = weight * share + (1 - weight);
    mean += (value - mean) * ((1 - weight) / share);
    return mean;
  });
}

function traces(figure, weight) {
  return figure.data.flatMap((trace) => {
    const meta = trace.meta || {};
    if (meta.heat) return [{ ...trace, colorscale: [[0, color("--card")], [1, color("--heat")]] }];
    const own = palette(meta.color || 0);
    const line = { ...trace.line, color: own };
    const drawn = { ...trace, line, marker: { ...trace.marker, color: own } };
    if (meta.band) return [{ ...drawn, fillcolor: faded(own, 0.16) }];
    if (meta.area) return [{ ...drawn, line: { ...line, width: 0.5 }, fillcolor: faded(own, 0.6) }];
    if (!meta.smooth || trace.mode !== "lines" || weight === 0) return [drawn];
    const raw = {
      ...drawn, line: { ...line, color: faded(own, 0.28), width: 1 },
      showlegend: false, hoverinfo: "skip",
    };
    return [raw, { ...drawn, y: smoothed(trace.y, weight) }];
  });
}

function layout(figure) {
  const text = color("--text"), grid = color("--line"), card = color("--card");
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickfont: { size: 11 } };
  return {
    height: 250, margin: { l: 48, r: 12, t: 8, b: 34 }, hovermode: "x unified",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: text } },
    xaxis: { ...axis, title: { text: "step", standoff: 4, font: { size: 11 } } },
    yaxis: { ...axis, automargin: true, ...(figure.log ? { type: "log", dtick: "D2" } : { type: "linear" }) },
  };
}

function draw() {
  root.dataset.theme = chosen || (dark.matches ? "dark" : "light");
  const weight = Number(slider.value);
  const options = { displayModeBar: false, responsive: true };
  return Promise.all(figures.map((figure, index) =>
    Plotly.react(charts[index], traces(figure, weight), layout(figure), options)));
}

async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  element.remove();
}

// little to smooth in a short run, where the mean would only lag behind
const longest = Math.max(...figures.flatMap((figure) => figure.data.map((trace) => trace.x.length)));
slider.value = longest < 100 ? 0.2 : 0.6;
root.dataset.theme = dark.matches ? "dark" : "light";
unpack(document.getElementById("plotly")).then(draw).then(() => { root.dataset.drawn = "yes"; });
slider.addEventListener("input", draw);
dark.addEventListener("change", draw);
document.getElementById("theme").addEventListener("click", () => {
  chosen = root.dataset.theme === "dark" ? "light" : "dark";
  draw();
});
