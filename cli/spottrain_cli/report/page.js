for (const figure of document.querySelectorAll("figure")) {
  const plot = figure.querySelector("svg"), said = figure.querySelector("figcaption span"), usual = said.textContent;
  const { last, low, high, log } = plot.dataset, scaled = log ? Math.log10 : Number;
  const places = figure.querySelector(".curve").getAttribute("d").slice(1).split("L").map(each => each.split(" ").map(Number));
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * 1000;
    const [x, y] = places.reduce((one, other) => Math.abs(other[0] - at) < Math.abs(one[0] - at) ? other : one);
    const value = scaled(low) + (1 - y / 300) * (scaled(high) - scaled(low));
    const step = Math.round(x / 1000 * last).toLocaleString("en");
    said.textContent = `step ${step}: about ${(log ? 10 ** value : value).toPrecision(3)}`;
  });
  plot.addEventListener("pointerleave", () => { said.textContent = usual; });
}
