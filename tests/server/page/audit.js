// What a person with little sight needs of the page, computed from what the browser drew.
const lens = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (colour) => {
  lens.clearRect(0, 0, 1, 1);
  lens.fillStyle = colour;
  lens.fillRect(0, 0, 1, 1);
  return [...lens.getImageData(0, 0, 1, 1).data];
};
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, place) => sum + v * [0.2126, 0.7152, 0.0722][place], 0);
const contrast = (a, b) => {
  const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
  return (high + 0.05) / (low + 0.05);
};
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const found = rgba(getComputedStyle(node).backgroundColor);
    if (found[3] === 255) return found;
  }
  return [255, 255, 255, 255];
};
const isShown = (node) => node.checkVisibility() && node.getClientRects().length > 0;
const problems = [];
let texts = 0;
for (const node of document.body.querySelectorAll("*")) {
  if (!isShown(node) || node.disabled) continue;
  const name = `${node.tagName}#${node.id}.${node.className}`;
  const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  const style = getComputedStyle(node);
  if (text && !["SCRIPT", "STYLE"].includes(node.tagName)) {
    texts++;
    const found = contrast(rgba(style.color), ground(node));
    if (found < 4.5) problems.push(`${name}: text ${found.toFixed(2)}`);
  }
  if (["BUTTON", "INPUT", "TEXTAREA"].includes(node.tagName) && node.type !== "range") {
    const edge = Math.max(contrast(rgba(style.borderTopColor), ground(node.parentElement)),
      contrast(rgba(style.backgroundColor), ground(node.parentElement)));
    if (edge < 3) problems.push(`${name}: edge ${edge.toFixed(2)}`);
    const { width, height } = node.getBoundingClientRect();
    if (width < 24 || height < 24) problems.push(`${name}: ${width} by ${height} is too small to hit`);
  }
}
// Colours of requests, beside the ground that they are drawn on and the number in them.
const card = ground(document.getElementById("pool")), text = rgba(css("--on-shade"));
for (let id = 1; id <= 400; id++) {
  const found = rgba(colour(id));
  if (contrast(found, card) < 3) problems.push(`request ${id}: ${contrast(found, card).toFixed(2)}`);
  if (contrast(found, text) < 4.5) problems.push(`number ${id}: ${contrast(found, text).toFixed(2)}`);
}
for (const paint of ["--edge", "--accent", "--ink", "--soft"]) {
  const found = contrast(rgba(css(paint)), card);
  if (found < 3) problems.push(`${paint}: ${found.toFixed(2)}`);
}
const wide = document.documentElement;
if (wide.scrollWidth > wide.clientWidth) problems.push(`${wide.scrollWidth} wide, not ${wide.clientWidth}`);
return { problems, texts };
