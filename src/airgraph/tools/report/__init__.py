"""`airgraph report`: everything that is known of a program's graphs, as one page that needs nothing else.

`collect` gathers the data while a program runs, `page` puts it into the HTML of the folder page/, where `report.js` draws
it. The layout of drawings is dagre's (page/dagre.LICENSE.txt).
"""
