// Search on a site that is opened from a disk: browsers start no worker there, so its script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const waiting = [];
      this.send = (message) => waiting.push(message);
      const start = () => {
        const inside = frame.contentWindow;
        inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        };
        inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => load(inside, one)), Promise.resolve());
        load(inside, url).then(() => {
          this.send = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
          waiting.forEach(this.send);
        });
      };
      const attach = () => {
        document.body.append(frame);
        start();
      };
      document.body ? attach() : addEventListener("DOMContentLoaded", attach);
    }

    postMessage(message) {
      this.send(message);
    }

    terminate() {}
  };

  const load = (inside, url) =>
    new Promise((done, fail) => {
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = done;
      script.onerror = fail;
      inside.document.head.append(script);
    });
}
