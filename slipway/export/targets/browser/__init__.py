"""Implements `slipway export browser`: a page that predicts in the browser, without a server.

The files of the page are in `page/`; `hop.js` there is served to Chromium only.
"""
