// Asks for the API key if the endpoint has keys, and keeps it for this tab.

import { keyStore } from "./api.js";
import { byId } from "./dom.js";
import { Notice } from "./notice.js";

export class Keys {
  /** `onKey()` is called when the key was set or forgotten. */
  constructor(onKey) {
    this.dialog = byId("key-dialog");
    this.notice = new Notice(byId("key-notice"));
    byId("key-button").addEventListener("click", () => this.ask());
    byId("key-close").addEventListener("click", () => this.dialog.close());
    byId("key-forget").addEventListener("click", () => {
      keyStore.forget();
      this.dialog.close();
      onKey();
    });
    byId("key-form").addEventListener("submit", () => {
      keyStore.set(byId("key-input").value.trim());
      byId("key-input").value = "";
      onKey();
    });
  }

  /** Show the key button. */
  showButton() {
    byId("key-button").hidden = false;
  }

  /** Open the dialog, with a message about the previous key. */
  ask(message = "") {
    this.showButton();
    this.notice.info(message);
    byId("key-forget").hidden = !keyStore.get();
    if (!this.dialog.open) this.dialog.showModal();
    byId("key-input").focus();
  }
}
