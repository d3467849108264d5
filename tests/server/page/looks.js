// What tests ask of the page, as functions of one object.
const byId = (id) => document.getElementById(id);
const all = (selector) => [...document.querySelectorAll(selector)];
const look = {
  text: (id) => byId(id).textContent,
  seek: (moment) => { player.follows = false; player.seek(moment); show(); },
  rows: () => [...byId("requests").rows].map((row) => [...row.cells].map((cell) => cell.textContent)),
  // The colour of each page's square, near its lower right corner, where no number is.
  squares: (count) => [...Array(count).keys()].map((page) => look.pixels(count, page, 20, 21, 1)[0]),
  // How many colours the inside of a page's square has.
  colours: (count, page) => new Set(look.pixels(count, page, 4, 4, 16).map(String)).size,
  pixels: (count, page, left, top, size) => {
    const canvas = byId("pool"), { side, columns } = grid(count, canvas.clientWidth);
    const x = (page % columns) * side + left, y = Math.floor(page / columns) * side + top;
    const { data } = canvas.getContext("2d").getImageData(x, y, size, size);
    return [...Array(size * size).keys()].map((pixel) => [...data.slice(4 * pixel, 4 * pixel + 4)]);
  },
  said: () => all("#talk p").map((line) => line.textContent),
  levels: () => all("h1, h2, h3, h4").filter((title) => title.checkVisibility()).map((title) => title.tagName),
  // What a screen reader reads aloud whenever it changes.
  live: () => all("[aria-live], [role=status], [role=alert], [role=log], output")
    .filter((place) => place.getAttribute("aria-live") !== "off").map((place) => place.id),
  focus: () => {
    const { activeElement: place } = document;
    return [place.id || place.className, getComputedStyle(place).outlineStyle];
  },
  moving: () => all("*").map(getComputedStyle)
    .filter((style) => style.transitionDuration !== "0s" || style.animationName !== "none").length,
};
