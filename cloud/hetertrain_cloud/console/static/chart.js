// A chart by ECharts. Colours are named as the style sheet names them, and follow dark and light.
import { echarts } from "nicegui-echart";
import { bytes, number, seconds } from "/console/static/format.js";

const WRITERS = { bytes, seconds };

function coloured(value, style) {
  if (typeof value === "string" && value.startsWith("var(")) return style.getPropertyValue(value.slice(4, -1)).trim();
  if (Array.isArray(value)) return value.map((each) => coloured(each, style));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each, style)]));
  }
  return value;
}

export default {
  props: { options: Object, label: String, unit: String, along: String },
  mounted() {
    this.chart = echarts.init(this.$el, null, { renderer: "canvas" });
    this.sizes = new ResizeObserver(() => this.chart.resize());
    this.sizes.observe(this.$el);
    this.themes = new MutationObserver(() => this.draw());
    this.themes.observe(document.body, { attributes: true, attributeFilter: ["class"] });
    this.draw();
  },
  unmounted() {
    this.sizes.disconnect();
    this.themes.disconnect();
    this.chart.dispose();
  },
  methods: {
    // ECharts' own ends could take more of the axis than the data do; with few digits, as their
    // labels are not seen but take room.
    fit(axis) {
      const margin = ({ min, max }) => (max - min || Math.abs(max) || 1) / 20;
      const unit = (data) => 10 ** Math.floor(Math.log10(margin(data)));
      const floor = (data) => Math.floor((data.min - margin(data)) / unit(data)) * unit(data);
      const ceiling = (data) => Math.ceil((data.max + margin(data)) / unit(data)) * unit(data);
      axis.min = (data) => floor(axis.ends || data);
      axis.max = (data) => ceiling(axis.ends || data);
      axis.axisLabel = { ...axis.axisLabel, showMinLabel: false, showMaxLabel: false };
    },
    draw() {
      const options = coloured(this.options, getComputedStyle(document.body));
      const write = WRITERS[this.unit] || number;
      const place = WRITERS[this.along] || ((value) => (typeof value === "string" ? value : number(value)));
      // What nodes are called is text: ECharts writes tooltips as markup where nobody says otherwise.
      const text = (part) => echarts.format.encodeHTML(String(part));
      const line = (each) => `${each.marker} ${text(each.seriesName)}: ${text(write(each.value[1]))}`;
      const point = (each) => `${text(each.name)}<br>${each.marker} ${text(each.seriesName)}`;
      const along = (all) => [text(place(all[0].value[0])), ...all.map(line)].join("<br>");
      options.tooltip = { ...options.tooltip, formatter: (found) => (Array.isArray(found) ? along(found) : point(found)) };
      for (const axis of [options.yAxis].flat().filter(Boolean)) {
        axis.axisLabel = { ...axis.axisLabel, formatter: write };
        if (axis.scale) this.fit(axis);
      }
      if (this.along) options.xAxis.axisLabel = { ...options.xAxis.axisLabel, formatter: place };
      this.chart.setOption(options, true);
    },
  },
  watch: {
    options() {
      this.draw();
    },
    along() {
      this.draw();
    },
  },
  render() {
    return Vue.h("div", { class: "chart", role: "img", "aria-label": this.label });
  },
};
