"""A text whose perplexity the demo computes."""

PASSAGE = (
    "The river Ense rises in the hills behind the old quarry and runs for sixty kilometres before it reaches the sea. "
    "For most of that way it is shallow enough to wade, and in a dry summer children cross it on stones with dry "
    "feet. In spring, when the snow melts, it is another river: brown, loud and fast, and strong enough to carry "
    "whole trees against the pillars of the bridges. The people who live along its banks have learned to read it. They "
    "know that a wet March means a high April, that the water comes first to the mill and last to the church, and that "
    "nothing should be planted in the lower meadows before the first week of May. When the new dam was built, an "
    "engineer came from the city to measure the flow, and he was surprised to find that the miller's notes, which went "
    "back more than a hundred years, agreed with his instruments to within a few centimetres."
)
