"""`slipway export browser`: a page that answers in the browser, without a server or network.

The files of the page are in `page/`; `hop.js` there is served to Chromium only.
"""
