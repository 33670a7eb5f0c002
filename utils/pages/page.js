"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const drawn = new Map();  // ECharts by element

  const digits = (value) => value == null ? "–" : Math.abs(value) < 1e4 ? String(Number(value.toPrecision(4))) : value.toFixed(0);
  const escaped = (text) => String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
  const between = (low, high) => low == null || high == null ? "" : `<br>90 % between ${digits(low)} and ${digits(high)}`;

  // A colour of the style sheet, as it is in the theme that is shown.
  const probe = document.body.appendChild(document.createElement("i"));
  const colour = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  const clear = (rgb, alpha) => rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
  const numbered = (number) => colour(number < 0 ? "other" : `c${number}`);

  const base = () => ({
    animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colour("ink") },
    tooltip: { confine: true, backgroundColor: colour("ground"), borderColor: colour("line"), padding: [8, 12],
               textStyle: { color: colour("ink"), fontSize: 13 }, extraCssText: "max-width:330px;white-space:normal;overflow-wrap:anywhere" },
  });
  const axis = (scale, more = {}) => ({
    type: scale.log ? "log" : "value", min: scale.low, max: scale.high, name: scale.title, nameLocation: "middle",
    nameTextStyle: { color: colour("muted"), fontSize: 12 }, axisLine: { show: false }, axisTick: { show: false, customValues: scale.ticks },
    axisLabel: { color: colour("muted"), fontSize: 12, hideOverlap: true, customValues: scale.ticks, showMinLabel: true, showMaxLabel: true, formatter: digits },
    splitLine: { lineStyle: { color: colour("line") }, interval: 0, customValues: scale.ticks }, ...more,
  });
  const lineOf = (points, style) => ({ type: "polyline", shape: { points }, style: { fill: "none", lineWidth: 1.4, ...style } });

  const beside = (line) => line.name.length <= 10;  // a limit whose name has room at the right of a chart

  function chart(plot, narrow) {
    const series = [], right = Math.max(16, ...plot.limits.filter(beside).map((line) => 14 + 7 * line.name.length));
    const limit = (line) => ({ yAxis: line.y, name: line.name, label: { position: beside(line) ? "end" : "insideEndTop" } });
    if (plot.equality != null) {
      const ends = [plot.x.low, plot.x.high], width = plot.equality;
      series.push({ type: "custom", silent: true, data: [0], clip: true, tooltip: { show: false }, renderItem: (_, api) => ({
        type: "polygon", style: { fill: colour("raised") },
        shape: { points: [...ends.map((at) => api.coord([at, at * (1 - width)])), ...ends.reverse().map((at) => api.coord([at, at * (1 + width)]))] } }) });
      series.push({ type: "line", silent: true, symbol: "none", data: [[plot.x.low, plot.x.low], [plot.x.high, plot.x.high]], lineStyle: { color: colour("other"), width: 1 }, tooltip: { show: false } });
    }
    plot.series.forEach((one, number) => {
      const paint = numbered(number % 6), marked = new Set(one.marked);
      const points = one.x.map((at, place) => ({ value: [at, one.y[place]], symbol: marked.has(place) ? "path://M0 0L10 10M10 0L0 10" : "circle" }));
      if (one.low.length && one.line && !one.whiskers) {
        series.push({ type: "custom", silent: true, data: [0], clip: true, z: 1, renderItem: (_, api) => ({ type: "polygon", style: { fill: clear(paint, 0.15) },
          shape: { points: [...one.x.map((at, place) => api.coord([at, one.low[place]])), ...one.x.map((at, place) => api.coord([at, one.high[place]])).reverse()] } }) });
      } else if (one.low.length) {
        series.push({ type: "custom", silent: true, data: one.x.map((at, place) => [at, one.low[place], one.high[place]]), clip: true, z: 1, renderItem: (_, api) =>
          lineOf([api.coord([api.value(0), api.value(1)]), api.coord([api.value(0), api.value(2)])], { stroke: clear(paint, 0.45) }) });
      }
      series.push({ type: one.line ? "line" : "scatter", name: one.name, id: `s${number}`, data: points, symbol: "circle", symbolSize: one.line ? 6 : one.x.length > 300 ? 5 : 8, showSymbol: one.x.length <= 40, z: 3,
                    color: paint, lineStyle: { width: 2, type: one.dash || "solid" }, labelLayout: { hideOverlap: true },
                    label: { show: one.beside.length > 0, formatter: (mark) => one.beside[mark.dataIndex], color: colour("muted"), fontSize: 11.5, position: "right", offset: [0, -6] }, itemStyle: one.line ? {} : { opacity: 0.8, borderColor: colour("ground"), borderWidth: 1 },
                    ...(number === 0 && plot.limits.length ? { markLine: { silent: true, symbol: "none", data: plot.limits.map(limit), lineStyle: { color: colour("bad"), width: 1.2, type: "dashed" },
                      label: { formatter: (mark) => mark.name, color: colour("bad"), fontSize: 12, backgroundColor: clear(colour("ground"), 0.8), padding: [1, 4] } } } : {}) });
    });
    const told = (mark) => {
      const one = plot.series[Number(mark.seriesId.slice(1))], place = mark.dataIndex;
      return `<b>${escaped(one.labels[place] ?? one.name)}</b> ${digits(one.y[place])}${between(one.low[place], one.high[place])}`;
    };
    const lines = plot.series.every((one) => one.line);
    const start = base();
    return { ...start, tooltip: { ...start.tooltip, trigger: lines ? "axis" : "item", axisPointer: { type: "line", lineStyle: { color: colour("muted") }, label: { show: false } },
        formatter: (marks) => lines ? `<span style="opacity:.7">${escaped(plot.x.title)} ${digits(marks[0].value[0])}</span><br>` + marks.filter((mark) => /^s\d/.test(mark.seriesId)).map(told).join("<br>")
          : /^s\d/.test(marks.seriesId) ? `${told(marks)}<br><span style="opacity:.7">${escaped(plot.x.title)} ${digits(marks.value[0])}</span>` : "" },
      legend: plot.series.length > 1 ? { top: 0, left: 0, data: plot.series.map((one) => one.name), icon: "roundRect", itemWidth: 12, itemHeight: 4, textStyle: { color: colour("muted"), fontSize: 12 } } : undefined,
      grid: { left: narrow ? 48 : 60, right, top: plot.series.length > 1 ? 40 : 16, bottom: 48, containLabel: false },
      xAxis: axis(plot.x, { nameGap: 30 }), yAxis: axis(plot.y, { nameGap: narrow ? 36 : 46 }), series };
  }

  // Names of bars, folded to the room beside them where names in tables break too.
  function folded(plot, width) {
    const room = Math.min((width < 560 ? 0.42 : 0.3) * width, 24 + 7 * Math.max(...plot.bars.map((bar) => bar.name.length)));
    const names = plot.bars.map((bar) => bar.name.split(/(?<=[,_/ ])|(?=@)/).reduce((text, part) =>
      text + (text && 7 * (text.split("\n").at(-1) + part).length > room - 12 ? "\n" : "") + part, ""));
    return { room, names, row: Math.max(28, ...names.map((name) => 8 + 13 * name.split("\n").length)) };
  }

  function bars(plot, narrow, width) {
    const log = plot.axis.log, height = 14, { room, names } = folded(plot, width);
    const start = base();
    return { ...start, tooltip: { ...start.tooltip, trigger: "axis", axisPointer: { type: "shadow", shadowStyle: { color: clear(colour("muted"), 0.08) } },
        formatter: (marks) => { const bar = plot.bars[marks[0].dataIndex];
          return `<b>${escaped(bar.name)}</b><br>${escaped(plot.axis.title)} ${digits(bar.value)}${between(bar.low, bar.high)}${bar.note ? `<br>${escaped(bar.note)}` : ""}`; } },
      grid: { left: room, right: 20, top: plot.limit ? 22 : 6, bottom: 46 },
      xAxis: axis(plot.axis, { nameGap: 30 }),
      yAxis: { type: "category", inverse: true, data: plot.bars.map((_, place) => place), axisLine: { show: false }, axisTick: { show: false },
               axisLabel: { color: colour("ink"), fontSize: narrow ? 11 : 12.5, lineHeight: 13, width: room - 12, overflow: "truncate", interval: 0, formatter: (_, place) => names[place] } },
      series: [{ type: "custom", encode: { x: [1, 2, 3], y: 0 }, data: plot.bars.map((bar, place) => [place, bar.value, bar.low, bar.high]),
        markLine: plot.limit ? { silent: true, symbol: "none", data: [{ xAxis: plot.limit.y, name: plot.limit.name }], lineStyle: { color: colour("bad"), width: 1.2, type: "dashed" }, label: { formatter: (mark) => mark.name, color: colour("bad"), position: "end", rotate: 0 } } : undefined,
        renderItem: (_, api) => {
          const place = api.value(0), bar = plot.bars[place], [x, y] = api.coord([bar.value, place]), from = api.coord([Math.min(Math.max(0, plot.axis.low), plot.axis.high), place])[0], children = [];
          if (!log) children.push({ type: "rect", shape: { x: Math.min(from, x), y: y - height / 2, width: Math.abs(x - from), height, r: x < from ? [3, 0, 0, 3] : [0, 3, 3, 0] }, style: { fill: clear(colour("c0"), 0.28) } });
          if (bar.low != null) {
            const [low, high] = [bar.low, bar.high].map((end) => api.coord([end, place])[0]), style = { stroke: colour("c0") };
            children.push(lineOf([[low, y], [high, y]], style), ...[low, high].map((end) => lineOf([[end, y - 4], [end, y + 4]], style)));
          }
          children.push({ type: "circle", shape: { cx: x, cy: y, r: 4.5 }, style: { fill: colour("c0"), stroke: colour("ground"), lineWidth: 1.5 } });
          return { type: "group", children };
        } }] };
  }

  function treemap(plot, narrow) {
    const whole = plot.whole.value, start = base();
    const largest = (part) => part.children ? largest(part.children.reduce((one, two) => (two.value > one.value ? two : one))) : part.colour;
    const nested = (part) => part.children ? { name: part.name, value: part.value, children: part.children.map(nested), itemStyle: { color: numbered(largest(part)) } }
      : { name: part.name, value: part.value, note: part.note, itemStyle: { color: numbered(part.colour) } };
    const heading = { show: true, height: 20, color: colour("ink"), fontSize: 12, fontWeight: 600, overflow: "truncate" };
    const level = (gap, width) => ({ itemStyle: { borderColor: colour("raised"), borderWidth: width, gapWidth: gap }, upperLabel: heading });
    return { ...start, tooltip: { ...start.tooltip, formatter: (mark) => {
        const path = mark.treePathInfo.slice(1).map((part) => part.name).join(" / ");
        return `<b>${escaped(path || mark.name)}</b><br>${digits(mark.value)} ${escaped(plot.unit)}, ${(100 * mark.value / whole).toFixed(1)} %${mark.data?.note ? `<br>${escaped(mark.data.note)}` : ""}`; } },
      series: [{ type: "treemap", data: plot.whole.children.map(nested), name: plot.whole.name, left: 0, right: 0, top: 0, bottom: 0, roam: false, nodeClick: "zoomToNode", leafDepth: narrow ? 3 : null, visibleMin: 60, childrenVisibleMin: 900,
        label: { color: colour("ground"), fontSize: 12, overflow: "truncate", formatter: (mark) => mark.name }, upperLabel: heading,
        itemStyle: { borderColor: colour("raised"), gapWidth: 1 },
        breadcrumb: { show: false },
        levels: [level(3, 0), level(2, 2), level(1, 2), level(1, 1), level(1, 1)] }] };
  }

  function timeline(plot, narrow) {
    const tracks = Object.keys(plot.tracks), start = base();
    const spans = tracks.flatMap((name, track) => plot.tracks[name].map((span) => [track, ...span]));
    const end = spans.reduce((latest, span) => Math.max(latest, span[2]), 0);
    return { ...start, tooltip: { ...start.tooltip, formatter: ({ value }) =>
        `<b>${escaped(plot.names[value[3]])}</b><br>${tracks[value[0]]}, ${digits((value[2] - value[1]) * 1000)} µs<br><span style="opacity:.7">from ${digits(value[1])} to ${digits(value[2])} ms</span>` },
      grid: { left: narrow ? 52 : 60, right: 12, top: 6, bottom: 78 },
      xAxis: { type: "value", min: 0, max: end, name: "ms from the start of the run", nameLocation: "middle", nameGap: 26, nameTextStyle: { color: colour("muted"), fontSize: 12 },
               axisLabel: { color: colour("muted"), fontSize: 12, formatter: digits, hideOverlap: true, showMaxLabel: false }, splitLine: { lineStyle: { color: colour("line") } } },
      yAxis: { type: "category", inverse: true, data: tracks, axisLine: { show: false }, axisTick: { show: false }, axisLabel: { color: colour("ink"), fontSize: 13 } },
      dataZoom: [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true },
                 { type: "slider", height: 18, bottom: 8, filterMode: "weakFilter", showDetail: false, brushSelect: false, borderColor: colour("line"), fillerColor: clear(colour("accent"), 0.14), handleStyle: { color: colour("accent") }, moveHandleSize: 0, showDataShadow: false }],
      series: [{ type: "custom", encode: { x: [1, 2], y: 0 }, data: spans, progressive: 0, renderItem: (_, api) => {
        const [x, y] = api.coord([api.value(1), api.value(0)]), to = api.coord([api.value(2), api.value(0)])[0], height = api.size([0, 1])[1] * 0.62;
        const frame = _.coordSys;
        const shape = echarts.graphic.clipRectByRect({ x, y: y - height / 2, width: Math.max(to - x, 0.6), height }, frame);
        return shape && { type: "rect", shape, style: { fill: numbered(api.value(4)), stroke: colour("ground"), lineWidth: to - x > 4 ? 0.6 : 0 } };
      } }] };
  }

  const kinds = { chart, bars, treemap, timeline };
  const heights = { bars: (plot, width) => folded(plot, width).row * plot.bars.length + (plot.limit ? 76 : 60) };

  function draw(element) {
    const plot = plots[element.dataset.plot];
    if (heights[plot.kind]) element.style.height = `${heights[plot.kind](plot, element.clientWidth)}px`;
    const narrow = element.clientWidth < 560;
    const made = drawn.get(element) ?? echarts.init(element, null, { renderer: plot.kind === "timeline" ? "canvas" : "svg" });
    drawn.set(element, made);
    made.resize();
    const whole = element.parentElement.querySelector(".whole");
    if (whole) {
      whole.hidden = true;
      whole.onclick = () => draw(element);
      made.off("click");
      made.on("click", () => { whole.hidden = false; });
    }
    made.setOption(kinds[plot.kind](plot, narrow, element.clientWidth), true);
  }
  const shown = () => [...document.querySelectorAll("[data-plot]")].filter((element) => element.clientWidth > 0);
  const drawAll = () => shown().forEach(draw);
  let width = 0;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  for (const folded of document.querySelectorAll("details")) folded.addEventListener("toggle", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.getElementById("theme").addEventListener("click", () => {
    const dark = getComputedStyle(root).colorScheme === "dark" || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.theme = dark ? "light" : "dark";
    drawAll();
  });
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    for (const table of document.querySelectorAll("figure.table")) table.dispatchEvent(new Event("showall"));
    drawAll();
    for (const made of drawn.values()) made.resize({ width: Math.min(made.getWidth(), 680) });
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    drawAll();
  });

  // Tables: sorted by a click on a column's name, filtered by words, cut to the first rows until one asks for all.
  for (const figure of document.querySelectorAll("figure.table")) {
    const body = figure.querySelector("tbody"), rows = [...body.rows], heads = [...figure.querySelectorAll("th")];
    const most = Number(figure.dataset.most), all = figure.querySelector(".all"), filter = figure.querySelector("input");
    let cut = rows.length > most + 3;
    const key = (row, place) => {
      const cell = row.cells[place], text = cell.innerText.trim(), number = cell.dataset.value ?? text.match(/^[-+−]?\d[\d.]*/)?.[0];
      return number === undefined ? text : Number(String(number).replace("−", "-"));
    };
    const show = () => {
      const words = (filter?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      let shownRows = 0;
      for (const row of body.rows) {
        const fits = words.every((word) => row.textContent.toLowerCase().includes(word));
        row.hidden = !fits || (cut && !words.length && shownRows >= most);
        shownRows += fits ? 1 : 0;
      }
      all.hidden = !cut || words.length > 0;
      all.textContent = `Show all ${rows.length} rows`;
    };
    heads.forEach((head, place) => {
      const numeric = rows.every((row) => !row.cells[place].classList.contains("words")) && rows.every((row) => typeof key(row, place) === "number" || !row.cells[place].textContent.trim());
      if (numeric && place) { head.classList.add("number"); for (const row of rows) row.cells[place].classList.add("number"); }
      head.firstElementChild.addEventListener("click", () => {
        const falling = head.ariaSort ? head.ariaSort === "ascending" : numeric;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const ordered = [...body.rows].sort((a, b) => {
          const [one, two] = [key(a, place), key(b, place)];
          const order = typeof one === "number" && typeof two === "number" ? one - two : String(one).localeCompare(String(two), "en", { numeric: true });
          return falling ? -order : order;
        });
        body.append(...ordered);
        show();
      });
    });
    filter?.addEventListener("input", show);
    all.addEventListener("click", () => { cut = false; show(); });
    figure.addEventListener("showall", () => { cut = false; show(); });
    show();
  }
  drawAll();
})();
