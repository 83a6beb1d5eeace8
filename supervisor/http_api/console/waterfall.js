// The bar of one request: when it waited, was read, was written, stood still, and was released.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
const THINNEST = 3;

// [kind, from, to] in ns, from the time points of a report; what goes on lasts until now.
export function segments(report, now) {
  const { queued, submitted, first_token: first, ended, released, pause_began: pausedSince } = report.time_points_ns;
  const end = ended ?? now;
  const found = [["queued", queued, submitted ?? end]];
  if (submitted !== null) found.push(["prefill", submitted, Math.min(first ?? end, end)]);
  if (first !== null) {
    // Pauses are known by their sum: they are drawn at the end of the decoding.
    const paused = report.figures.paused_s * 1e9 + (pausedSince === null ? 0 : Math.max(0, end - pausedSince));
    const border = Math.max(first, end - paused);
    found.push(["decode", first, border]);
    if (paused > 0) found.push(["paused", border, end]);
  }
  if (ended !== null) found.push(["release", ended, released ?? now]);
  return found.filter(([, from, to]) => to > from);
}

export function draw(svg, report, from, now) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} 10`);
  svg.setAttribute("preserveAspectRatio", "none");
  const scale = WIDTH / Math.max(1, now - from);
  const parts = segments(report, now).filter(([, , end]) => end > from);
  const track = rectangle("track", 0, WIDTH, 4, 2);
  svg.replaceChildren(track, ...parts.map(([kind, begin, end]) => {
    const x = Math.max(0, (begin - from) * scale);
    return rectangle(kind, x, Math.max(THINNEST, (end - from) * scale - x), 0, 10);
  }));
  const told = parts.map(([kind, begin, end]) => `${kind} ${((end - begin) / 1e9).toFixed(3)} s`).join(", ");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", told);
}

function rectangle(kind, x, width, y, height) {
  const made = document.createElementNS(SVG, "rect");
  for (const [name, value] of Object.entries({ x, width, y, height, class: kind })) made.setAttribute(name, value);
  return made;
}

export function empty() {
  const svg = document.createElementNS(SVG, "svg");
  svg.classList.add("bar-chart");
  return svg;
}
