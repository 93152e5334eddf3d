// A browser starts no worker from file://. There the theme's search runs in a frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inside.document.createElement("script");
          script.src = address;
          script.onload = () => resolve(inside);
          inside.document.body.append(script);
        };
      });
      document.body.append(frame);
    }
    async postMessage(data) {
      (await this.loaded).dispatchEvent(new MessageEvent("message", { data }));
    }
  };
