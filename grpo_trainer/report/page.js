"use strict";
const root = document.documentElement;
const charts = [...document.querySelectorAll(".chart")];
const figures = charts.map((place) => JSON.parse(place.dataset.figure));
const slider = document.getElementById("smoothing");

const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const palette = (index) => color(`--c${index % 6}`);

function faded(hex, opacity) {
  const part = (from) => parseInt(hex.slice(from, from + 2), 16);
  return `rgba(${part(1)}, ${part(3)}, ${part(5)}, ${opacity})`;
}

// bias-corrected exponential mean: weight 0 returns the values, and equal values stay equal
function smoothed(values, weight) {
  let mean = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    share = weight * share + (1 - weight);
    mean += (value - mean) * ((1 - weight) / share);
    return mean;
  });
}

function trace([name, x, y], index, more) {
  const own = palette(index);
  const mode = x.length > 1 ? "lines" : "markers";
  return { name, x, y, mode, line: { width: 2, color: own }, marker: { color: own }, ...more };
}

function lines(figure, weight) {
  return figure.lines.flatMap((curve, index) => {
    const own = palette(index);
    const drawn = trace(curve, index, { showlegend: figure.lines.length > 1 });
    if (drawn.x.length === 0) return [];
    if (figure.stacked) {
      const line = { width: 0.5, color: own };
      return [{ ...drawn, line, stackgroup: "one", fillcolor: faded(own, 0.6) }];
    }
    if (!figure.smooth || drawn.mode !== "lines" || weight === 0) return [drawn];
    const line = { color: faded(own, 0.28), width: 1 };
    const raw = { ...drawn, line, showlegend: false, hoverinfo: "skip" };
    return [raw, { ...drawn, y: smoothed(drawn.y, weight) }];
  });
}

function traces(figure, weight) {
  if (figure.heat) {
    return [{
      ...figure.heat, type: "heatmap", colorscale: [[0, color("--card")], [1, color("--heat")]],
      hovertemplate: "step %{x}<br>reward %{y:.3g}<br>%{z:.0%}<extra></extra>",
      colorbar: { tickformat: ".0%", thickness: 10 },
    }];
  }
  const hidden = { line: { width: 0 }, showlegend: false, hoverinfo: "skip" };
  const fill = { fill: "tonexty", fillcolor: faded(palette(0), 0.16) };
  const band = figure.band.map((edge, upper) => trace(edge, 0, upper ? { ...hidden, ...fill } : hidden));
  const dots = figure.dots.map((curve, index) => {
    const marker = { size: 8, symbol: "diamond", color: palette(index + 1) };
    return trace(curve, index + 1, { mode: "markers", marker });
  });
  return [...band, ...lines(figure, weight), ...dots];
}

// the range of an axis with only one value: plotly's default is from 1 below to 1 above
function around(values, margin) {
  const known = values.filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low === high ? { range: [low - margin(low), high + margin(high)] } : {};
}

function layout(figure) {
  const text = color("--text"), grid = color("--line"), card = color("--card");
  const drawn = figure.heat ? [] : traces(figure, 0);
  const steps = around(drawn.flatMap(({ x }) => x), () => 1);
  const heights = around(drawn.flatMap(({ y }) => y), (value) => Math.abs(value) / 2 || 1);
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickfont: { size: 11 } };
  return {
    height: 250, margin: { l: 48, r: 12, t: 8, b: 34 }, hovermode: "x unified",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: text, size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: text } },
    xaxis: { ...axis, ...steps, title: { text: "step", standoff: 4, font: { size: 11 } } },
    yaxis: { ...axis, automargin: true, ...(figure.log ? { type: "log", dtick: "D2" } : { type: "linear", ...heights }) },
  };
}

function draw() {
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

// in a short run there is little to smooth, and the mean would only lag
const longest = Math.max(...figures.flatMap((figure) => traces(figure, 0).map(({ x }) => x.length)));
slider.value = longest < 100 ? 0.2 : 0.6;
unpack(document.getElementById("plotly")).then(draw).then(() => { root.dataset.drawn = "yes"; });
slider.addEventListener("input", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
