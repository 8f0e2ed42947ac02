// A page opened from a disk may not start a worker, and the theme's search runs in one. Under
// file:// this runs the worker's script in a hidden frame instead; elsewhere it does nothing.
if (location.protocol === "file:") {
  // The search's script asks its parent for this name, to find its own folder
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inner = frame.contentWindow
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inner.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each)
      }
      this.ready = this.load(url)
    }

    load(url) {
      const script = this.inner.document.createElement("script")
      script.src = url
      return new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = () => reject(new Error(`cannot load ${url}`))
        this.inner.document.body.append(script)
      })
    }

    postMessage(data) {
      const deliver = () => this.inner.dispatchEvent(new MessageEvent("message", { data }))
      this.ready.then(deliver, (error) => console.error(error))
    }

    terminate() {
      this.inner.frameElement.remove()
    }
  }
}
