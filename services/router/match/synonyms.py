"""Words that may stand for each other in a question, beside WordNet's: one group a line, as they are written."""

from __future__ import annotations

_NEAR = """
delete remove erase
remove discard eliminate clear
recover restore retrieve
improve boost raise increase enhance
reduce lower decrease lessen cut
contagious infectious transmissible
deliver ship
delivery shipping shipment
package parcel shipment
order purchase
return refund
customer client
customer consumer
support service help assistance
contact reach
fix repair resolve solve
issue problem trouble error
change modify alter update edit adjust
update upgrade
switch change
transfer move send
transfer wire
quickly fast rapidly quick swiftly
fast quick rapid
slow sluggish
big large huge
small little tiny
begin start commence launch
finish end complete conclude
stop end halt cease terminate
cancel terminate end stop
close shut
make create build construct produce generate
create generate produce
write compose draft author
buy purchase get obtain acquire
get obtain receive acquire
receive get
find locate discover
find get
search look hunt
show display view see
show reveal
see view watch
see visit
choose select pick
use utilize employ
use apply
need require
need want
want wish
keep store preserve
keep maintain retain
save keep store
clean wash cleanse
cook prepare make
make cook bake
prepare ready
eat consume feed
feed eat
ill sick unwell
illness disease sickness condition
disease disorder condition
symptom sign indication
treat cure heal
treatment therapy cure remedy
medicine medication drug
doctor physician
prevent avoid avert
cause trigger
cause reason
happen occur
explain describe clarify
explanation description
difference distinction
different distinct
similar alike comparable
job position role employment
job work occupation
boss manager supervisor
employee worker staff
salary pay wage
raise increase rise
quit resign leave
hire recruit employ
company business firm
meeting appointment
schedule plan arrange
schedule timetable
trip journey travel
travel go
visit travel see
vacation holiday
hotel accommodation lodging
flight plane
airplane plane aircraft
luggage baggage bags
car automobile vehicle
rent hire lease
ticket pass
cost price fee charge
cost expense
cheap inexpensive affordable
expensive costly pricey
money cash funds
money currency
pay settle
invoice bill
invoice receipt
payment transaction
send mail
send submit
submit file hand
tax taxes
earn make
open unlock
open start launch
enable activate
disable deactivate
setup configure install
configure set
install add
download get
upload add
login access
password passcode
username user
account profile
email mail
message text
phone telephone mobile smartphone cellphone
computer pc laptop
laptop notebook
photo picture image pic
video clip film
movie film
song track
app application
program software application
screen display
folder directory
file document
copy duplicate
copy backup
backup save
free release clear
space storage room
memory ram
speed velocity
speed accelerate
slow reduce
connect link join pair attach
disconnect unlink detach
join combine merge unite
combine merge mix blend
split divide separate
add include insert
add append
sort order arrange
list enumerate
list array
string text
function method
method procedure
dictionary dict
loop iterate
iterate traverse loop
parse read
run execute launch
execute run
compile build
test check
check verify confirm
check inspect
verify validate confirm
convert change transform turn
convert translate
calculate compute determine
compute determine
measure determine
number count amount quantity
amount quantity
total sum
average mean
answer reply respond response
ask request
request demand
allow permit let
allowed permitted
legal lawful
illegal unlawful
law legislation
lawyer attorney
contract agreement
landlord owner
tenant renter
house home
apartment flat
room chamber
kitchen cooking
stain spot mark
clogged blocked
unclog clear open
dirty filthy
water irrigate
plant grow
plant sow
garden yard
dog puppy
cat kitten
child kid
children kids
baby infant
mother mom mum
father dad
teacher instructor
student pupil
school college
learn study
learn understand
teach instruct
exam test
homework assignment
essay paper
book novel
author writer
write author
read study
country nation
city town
place location spot
location position
road street
near close
nearby close
distance far
weather climate
hot warm
cold chilly
rain rainfall
happy glad
sad unhappy
angry mad
scared afraid
important significant crucial
main primary principal key
necessary required needed
useful helpful beneficial
benefit advantage
disadvantage drawback downside
risk danger hazard
dangerous unsafe hazardous
safe secure
secure protect
protect guard shield
hard difficult tough
easy simple
beautiful pretty
famous popular
old ancient
new recent
latest newest
correct right proper
wrong incorrect
accurate precise
entire whole complete
part piece portion
type kind sort
way method manner
advice tip suggestion recommendation
suggest recommend advise
recommended advised suggested
idea suggestion
goal aim objective
purpose function
effect impact influence
affect influence impact
result outcome consequence
consequence effect
reason cause
meaning definition
mean signify
term word
phrase expression
rule regulation
size dimension
height tall
length duration
duration time
age old
lifespan expectancy
live survive
die pass
sleep rest
asleep sleep
tired exhausted
drink beverage
food meal
meal dish
recipe instructions
ingredient component
substitute replacement alternative
replace substitute
replace change swap
swap exchange
exchange trade
refrigerator fridge
freezer freeze
oven stove
spicy hot
tasty delicious
exercise workout
workout training
train practice prepare
weight mass
lose shed drop
gain get
fat weight
pain ache
headache migraine
stomach belly
hurt ache
injury wound
match game
team squad
player athlete
win triumph
invent create devise develop
develop create build
discover find
build construct erect
found establish
begin found
war conflict
ruler king monarch
leader head
head chief
government administration
vote elect
population people inhabitants
inhabitant resident
speak talk
talk speak chat
tell inform
notify inform alert
subscribe register enroll
register enroll
subscription membership
membership plan
plan package
renew extend
extend prolong
expire end
deadline date
deadline due
late delayed
delay postpone
early soon
track follow trace
follow pursue
block ban
report flag
complain complaint
damaged broken
broken faulty defective
item product
product article
purchase item
buy order
shop store
available accessible
stock available
discount reduction
coupon voucher code
gift present
card certificate
warranty guarantee
guarantee ensure
ensure guarantee
cover include
insurance coverage
claim file
loan credit
debt loan
mortgage loan
invest put
interest rate
bank financial
deposit put
withdraw take
transfer remit
abroad overseas
foreign overseas
passport document
visa permit
permit license
license licence
apply request
application form
form document
fill complete
sign subscribe
print output
scan read
reset restore
reset change
forgot forgotten lost
lost missing misplaced
missing absent
locked blocked
stuck frozen
crash fail
restart reboot
reboot reset
charge load
battery power
network connection
internet web online
website site webpage
page webpage
link url
browser web
search query
query question
database db
table chart
graph chart plot
draw sketch
drawing picture
color colour
shape form
round circular
center centre middle
top upper
bottom lower
side edge
begin initiate
grow increase
grow expand
shrink reduce
handle manage
manage control
manage organize
organize arrange
lead guide
guide manual tutorial
introduction overview
overview summary
summary abstract
summarize outline
short brief
long lengthy
quickly speedily
noisy loud
noise sound
smell odor
odor stench
dry drain
hang mount
attach fasten
cut slice chop
boil cook
heat warm
cool chill
cute adorable
smart intelligent clever
strange odd weird
usual normal typical
usually normally typically
often frequently
sometimes occasionally
currently presently now
approximately about roughly
maximum max
minimum min
information info details
documentation docs
administrator admin
repository repo
configuration config settings
setting option
parameter argument
variable var
environment env
directory dir
command instruction
temperature temp
vs versus
kilometer km
"""


def _table() -> dict[str, frozenset[int]]:
    groups: dict[str, set[int]] = {}
    for number, line in enumerate(_NEAR.strip().splitlines()):
        for word in line.split():
            groups.setdefault(word, set()).add(number)
    return {word: frozenset(numbers) for word, numbers in groups.items()}


_GROUPS = _table()


def near(xs: tuple[str, ...], ys: tuple[str, ...]) -> bool:
    """A form of one word and a form of the other stand in one group."""
    own: set[int] = set()
    for x in xs:
        own |= _GROUPS.get(x, frozenset())
    return any(not own.isdisjoint(_GROUPS.get(y, ())) for y in ys)
