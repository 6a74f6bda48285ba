// Draws the charts in the colours of the style sheet, and, on a live page, asks for news.
(() => {
  "use strict";
  const VARIABLE = /^var\((--[\w-]+)\)(?:\/([\d.]+))?$/;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const settings = {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  function transparent(hex, alpha) {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r}, ${g}, ${b}, ${alpha})`;
  }

  // Every text of the form var(--name) or var(--name)/alpha becomes the colour that the style sheet says now.
  function coloured(node, style) {
    if (typeof node === "string") {
      const found = VARIABLE.exec(node);
      if (!found) return node;
      const value = style.getPropertyValue(found[1]).trim();
      return found[2] ? transparent(value, found[2]) : value;
    }
    if (Array.isArray(node)) return node.map((item) => coloured(item, style));
    if (node && typeof node === "object") {
      return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, coloured(value, style)]));
    }
    return node;
  }

  function layout(own, style, narrow) {
    const axis = {
      gridcolor: "var(--faint)", linecolor: "var(--faint)", zerolinecolor: "var(--faint)",
      automargin: true, tickfont: { color: "var(--soft)" }, title: { font: { color: "var(--soft)", size: 13 }, standoff: 12 },
    };
    const joined = (name) => ({ ...axis, ...own[name], title: { ...axis.title, ...(own[name] || {}).title } });
    const base = {
      paper_bgcolor: "rgba(0, 0, 0, 0)", plot_bgcolor: "rgba(0, 0, 0, 0)", uirevision: "kept",
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 12 : 13, color: "var(--ink)" },
      hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--faint)", font: { color: "var(--ink)" }, namelength: -1 },
      modebar: { bgcolor: "rgba(0, 0, 0, 0)", color: "var(--soft)", activecolor: "var(--ink)" },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, font: { color: "var(--ink)" } },
      showlegend: true,
    };
    const margin = { l: 8, r: 12, t: 28, b: 8, ...own.margin };
    return coloured({ ...base, ...own, margin, xaxis: joined("xaxis"), yaxis: joined("yaxis") }, style);
  }

  // How many rows the names take side by side, each with its line.
  function legendRows(names, width) {
    let rows = 1, used = 0;
    for (const name of names) {
      const wide = 60 + 7.5 * name.length;
      if (used && used + wide > width) [rows, used] = [rows + 1, 0];
      used += wide;
    }
    return rows;
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const plot of document.querySelectorAll(".plot")) {
      const spec = JSON.parse(plot.parentElement.querySelector("script").textContent);
      const narrow = plot.clientWidth < 480;
      if (spec.layout.showlegend !== false && !spec.layout.height) {
        const names = spec.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name || "");
        plot.style.height = `${(narrow ? 280 : 330) + 30 * legendRows(names, plot.clientWidth - 90)}px`; // room for it
      }
      Plotly.react(plot, coloured(spec.data, style), layout(spec.layout, style, narrow), settings);
    }
  }

  // The new page takes the old one's place, but charts stay where they are, zoomed and toggled as they were.
  function replace(text) {
    const next = new DOMParser().parseFromString(text, "text/html").querySelector("main");
    for (const plot of next.querySelectorAll(".plot")) {
      const old = document.getElementById(plot.id);
      if (old) plot.replaceWith(old);
    }
    for (const open of document.querySelectorAll("details[open]")) {
      const same = next.querySelector(`#${CSS.escape(open.id)}`);
      if (same) same.open = true;
    }
    const at = scrollY;
    document.querySelector("main").replaceWith(next);
    scrollTo({ top: at, behavior: "instant" });
    draw();
  }

  async function watch() {
    let version = "";
    for (;;) {
      await new Promise((wake) => setTimeout(wake, 1500));
      try {
        const answer = await fetch(location.pathname, { headers: { "If-None-Match": version }, cache: "no-store" });
        if (answer.status === 200) {
          version = answer.headers.get("ETag") || "";
          replace(await answer.text());
        }
      } catch {
        const mark = document.getElementById("live");
        if (mark) mark.textContent = "no longer live: the command has ended";
        return;
      }
    }
  }

  draw();
  dark.addEventListener("change", draw);
  if ("live" in document.body.dataset) watch();
})();
