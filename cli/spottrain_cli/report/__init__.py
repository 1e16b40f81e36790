"""`spottrain report`: how a run went, on one page of HTML that needs nothing else.

reading     I/O: the series of steps from a store
facts       a TrainingJob and the series -> `Report`
findings    what cost the most time, and what to do about it
curves      points of the series -> as many columns as a screen has
charts      SVG and HTML of each chart
markup      elements of HTML; whatever is put into one is escaped
page        `Report` -> the page
"""
