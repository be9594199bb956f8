// A dialog of the browser's own: it takes and gives back the focus, and Escape closes it.

export default {
  props: { open: Boolean, label: String, wide: Boolean },
  emits: ["dismiss"],
  watch: {
    open() {
      this.follow();
    },
  },
  mounted() {
    this.follow();
  },
  beforeUnmount() {
    // Closed first, so that the focus goes back to where it was.
    if (this.$el.open) this.$el.close();
  },
  methods: {
    follow() {
      if (this.open && !this.$el.open) this.$el.showModal();
      if (!this.open && this.$el.open) this.$el.close();
    },
  },
  render() {
    const onCancel = (event) => {
      event.preventDefault();
      this.$emit("dismiss");
    };
    const attributes = { class: ["modal", this.wide && "modal-wide"], "aria-label": this.label, onCancel };
    return Vue.h("dialog", attributes, this.$slots.default?.());
  },
};
